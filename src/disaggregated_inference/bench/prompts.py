"""Models and prompts of the benchmarks."""

import numpy as np

from disaggregated_inference.models import FileKind, ModelFiles, ModelStore
from disaggregated_inference.progress import steps

_SENTENCE = (
    "The cache of a prompt is computed once, moves to another machine while it is being computed, and is used there. "
)

# For measurements that depend on the words.
TEXTS = (
    """Summarise this for someone who has never seen a computer room:

When a language model answers, it first reads the whole prompt. For every token it computes two vectors per layer, a \
key and a value, and keeps them, because each later token has to look back at all of them. This store is called the \
KV cache. Reading is limited by arithmetic: all tokens of the prompt go through the model at once, and a machine \
with fast matrix units does it in a moment. Writing is limited by memory: for each new token all weights have to \
come from memory once, and the arithmetic units wait most of the time. So one machine may be the best reader and \
another the best writer. If both are in the same room, the first can read the prompt and send the cache over the \
network to the second, which then writes the answer as if it had read the prompt itself. The cache of a long prompt \
is large, hundreds of megabytes or more, and it would be a waste to wait until all of it has been computed. It is \
better to send each layer as soon as it is done, while the next is being computed. What is left to send when the \
last layer is done is all that the user notices.""",
    '''What does this function return for [3, 1, 2], and how long does it take for n items? Then write a faster one.

```python
def arranged(items):
    """A new list with the same items, the smallest first."""
    found = []
    for item in items:
        at = 0
        while at < len(found) and found[at] <= item:
            at += 1
        found.insert(at, item)
    return found


def test_arranged():
    assert arranged([]) == []
    assert arranged([1]) == [1]
    assert arranged([2, 1, 2]) == [1, 2, 2]
```''',
    """Continue the story in the same tone.

The lighthouse had been dark for eleven years when the letter came. It was addressed to the keeper, and since there \
was no keeper, the postman gave it to the old woman who lived at the foot of the hill and fed the gulls. She read it \
twice. Then she put on her coat, took the lamp from the kitchen and went up the path, slowly, because of the wind. \
At the top she found the door open.""",
    """Answer with a JSON object with the fields "city", "arrival" and "travellers".

Dear Ms Okafor, thank you for your order. The train to Lisbon leaves on Friday at 7:40 and arrives at 16:15; seats \
61, 62 and 63 in coach 4 are reserved for you and your two colleagues. Please note that breakfast is served until \
10:00. Should your plans change, you may return the tickets until Wednesday without a fee. We wish you a pleasant \
journey.""",
)


def resolve_model(name: str, kind: FileKind = "safetensors") -> ModelFiles:
    with steps() as progress:
        return ModelStore().resolve(name, progress, kind)


def token_prompt(length: int, number: int = 0, vocabulary: int = 410) -> list[int]:
    """Random token ids; without a vocabulary, ids that every model has. Another number gives another prompt."""
    ids: list[int] = np.random.default_rng([number, length]).integers(10, vocabulary, length).tolist()
    return ids


def row_prompts(length: int, rows: int, vocabulary: int) -> list[list[int]]:
    """A prompt of its own for every row of a batch: equal rows would choose the same experts of a mixture, and a batch
    of them reads fewer weights than any real one."""
    return [token_prompt(length, number, vocabulary) for number in range(rows)]


def text_prompt(model: ModelFiles, length: int) -> list[int]:
    """A text with exactly `length` tokens."""
    tokens = model.tokenizer.encode(_SENTENCE)
    return (tokens * (length // len(tokens) + 1))[:length]
