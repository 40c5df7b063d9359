"""`python steady_requests.py URL MODEL`: asks a gateway from three threads until its input ends.

Every second answer is streamed. At the end it prints how many answers were whole, and what the others were.
"""

import itertools
import json
import sys
import threading
import time
import urllib.error
import urllib.request

TOKENS, THREADS, PAUSE_S = 24, 3, 0.4


def ask(url: str, model: str, number: int) -> None:
    """Raises unless the answer is whole."""
    prompt = " ".join([str(time.time_ns()), *map(str, range(60))])  # each is new: a cached one would move no KV
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": bool(number % 2)}
    body |= {"stream_options": {"include_usage": True}} if number % 2 else {}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        text = response.read().decode()
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert not events or events[-1] == "[DONE]", text[-300:]
    found = [json.loads(event) for event in events[:-1]] if events else [json.loads(text)]
    tokens = [each["usage"]["completion_tokens"] for each in found if each.get("usage")]
    assert tokens == [TOKENS], text[-300:]


def main() -> None:
    url, model = sys.argv[1:]
    ended, numbers = threading.Event(), itertools.count()
    whole: list[int] = []
    failed: list[str] = []

    def work() -> None:
        while not ended.is_set():
            time.sleep(PAUSE_S)
            number = next(numbers)
            try:
                ask(url, model, number)
                whole.append(number)
            except Exception as error:
                words = error.read().decode() if isinstance(error, urllib.error.HTTPError) else ""
                failed.append(f"{type(error).__name__}: {error} {words}")

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    print("asking", flush=True)
    sys.stdin.read()
    ended.set()
    for thread in threads:
        thread.join()
    print(json.dumps({"whole": len(whole), "failed": failed}), flush=True)


if __name__ == "__main__":
    main()
