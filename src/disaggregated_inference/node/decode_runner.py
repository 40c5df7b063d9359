"""From an admitted request to the decode batch: open its sequences, fill one with the prompt's KV, copy it."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from disaggregated_inference.errors import DisaggError, KVMemoryFull
from disaggregated_inference.node.choice import Choice
from disaggregated_inference.node.decode_task import DecodeTask
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.kv_source import KVSource
from disaggregated_inference.node.open_tasks import OpenTasks
from disaggregated_inference.node.scheduler import Work


class DecodeRunner:
    def __init__(self, kv_memory: KVMemory, kv_source: KVSource, requests: OpenTasks) -> None:
        self._kv_memory, self._scheduler, self._kv_source = kv_memory, kv_memory.scheduler, kv_source
        self._requests = requests
        self._scheduler.batch.on_finish = self._finish_choice
        self._tasks: dict[Choice, DecodeTask] = {}  # of the choices in the batch

    def run_in_thread(
        self, task: DecodeTask, receive: Callable[[], None], prepare: Callable[[], None] = lambda: None
    ) -> None:
        """For KV from elsewhere. `receive` fills the first sequence and samples the first tokens."""

        def run() -> None:
            try:
                prepare()
                if self._scheduler.call(lambda: self._open(task)):
                    receive()
                    self._scheduler.submit(self._start_decoding(task), urgent=True).result()
            except BaseException as error:  # of a cancelled request, the cancellation is the reason
                self._requests.finish(task, task.generation.cancel_error or error)

        threading.Thread(target=run, name="decode", daemon=True).start()

    def run_local(self, task: DecodeTask) -> None:
        """For a prompt that this node's engine computes."""

        def settle(done: "Future[None]") -> None:
            if error := done.exception():
                self._requests.finish(task, task.generation.cancel_error or error)

        try:
            self._scheduler.submit(self._prefill(task)).add_done_callback(settle)
        except BaseException as error:
            self._requests.finish(task, error)

    def _prefill(self, task: DecodeTask) -> Work[None]:
        if self._open(task):
            yield from self._kv_source.compute(task)
            yield from self._start_decoding(task)

    def _open(self, task: DecodeTask) -> bool:
        """Open a sequence for each choice. False: the free memory is not in one piece, and the request waits again."""
        task.generation.raise_if_cancelled()
        try:
            for _ in task.grammars:
                task.sequences.append(self._kv_memory.open(task.capacity))
        except KVMemoryFull:
            self._kv_memory.close(*task.sequences)
            task.sequences.clear()
            assert task.claim
            self._kv_memory.admission.requeue(task.claim)
            return False
        task.generation.raise_if_cancelled()  # again: opening may have loaded the model, which takes long
        return True

    def _start_decoding(self, task: DecodeTask) -> Work[None]:
        """Copy the prompt's KV for every further choice, and add all choices to the batch."""
        task.generation.raise_if_cancelled()
        engine = self._scheduler.engine
        first, *others = task.sequences
        if others:
            for piece in engine.export(first):
                for sequence in others:
                    engine.place(sequence, piece)
                yield
            for sequence in others:
                engine.commit(sequence, first.length)
        task.running_choices = len(task.choices)
        for choice, sequence in zip(task.choices, task.sequences, strict=True):
            choice.sequence = sequence
            self._tasks[choice] = task
            self._scheduler.batch.join(choice)

    def _finish_choice(self, choice: Choice, error: BaseException | None) -> None:
        """An error of one choice ends the whole request."""
        task = self._tasks.pop(choice)
        task.running_choices -= 1
        if error and task.running_choices:
            task.generation.cancel(error if isinstance(error, DisaggError) else DisaggError(str(error)))
        if not task.running_choices:
            self._requests.finish(task, task.generation.cancel_error or error)
