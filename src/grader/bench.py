"""The grader's speed: notebooks per minute with both models at once, and one after the other, in the same run."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import msgspec

from grader.grading import ModelFigures, model_figures
from grader.layers import Submission, check_items
from grader.local_cluster import local_cluster
from grader.models import Ask, ClusterEndpoint, ModelSettings, ModelsResult, Question, RawAnswer, Work, analyse
from grader.notebook import read_notebook
from grader.rubric import load_rubric
from grader.synthetic import make_class

_EMBEDDED = "smollm2"
_SIMULATED = {"code": "simulated:qwen3-30b-a3b", "feedback": "simulated:gpt-oss-120b"}
_TEXT_CHARS, _WARM_UP_TOKENS = 60, 16


class BenchRow(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    seconds: float
    figures: ModelFigures

    @property
    def per_minute(self) -> float:
        return 60 * self.figures.notebooks / self.seconds


class BenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    notebooks: int
    simulated: str = ""  # two machines; empty: the embedded model
    at_once: int = 4
    answer_tokens: int = 400  # longest answers


def measure(settings: BenchSettings, say: Callable[[str], None]) -> list[BenchRow]:
    """Every row begins with an empty prefix cache: requests of a row share a salt of their own."""
    works = _works(settings.notebooks)
    with _places(settings.simulated) as places:
        _warm_up(works[0], places)
        rows = []
        for name, in_parallel, at_once in _rows(settings.at_once):
            say(name)
            models = _model_settings(places, in_parallel, settings.answer_tokens)
            rows.append(_measured(name, works, places, models, at_once))
        return rows


def _rows(at_once: int) -> list[tuple[str, bool, int]]:
    rows = [("one after the other", False, 1), ("both at once", True, 1)]
    return rows + ([(f"both, {at_once} notebooks", True, at_once)] if at_once > 1 else [])


class _Places(msgspec.Struct, frozen=True):
    """The cluster file and the model of each layer."""

    configs: dict[str, str]
    models: dict[str, str]


@contextmanager
def _places(simulated: str) -> Iterator[_Places]:
    """The embedded model serves both layers. Simulated models have a pair of machines each."""
    with ExitStack() as stack:
        if not simulated:
            cluster = stack.enter_context(local_cluster())
            yield _Places(dict.fromkeys(_SIMULATED, cluster.config), dict.fromkeys(_SIMULATED, _EMBEDDED))
            return
        found = {layer: stack.enter_context(local_cluster(simulated, model)) for layer, model in _SIMULATED.items()}
        yield _Places({layer: cluster.config for layer, cluster in found.items()}, _SIMULATED)


def _works(count: int) -> list[Work]:
    """Readable notebooks of a synthetic class."""
    made = make_class("python", students=3 * count + 12)
    rubric, solution = load_rubric(made.rubric), read_notebook(made.solution, "solution")
    notebooks = [read_notebook(one.data, "student") for one in made.submissions]
    usable = [one for one in notebooks if 500 < sum(len(cell.source) for cell in one.cells) < 8000][:count]
    return [
        Work(
            rubric=rubric,
            notebook=notebook,
            solution=solution,
            verdicts=check_items(rubric, Submission(notebook=notebook, solution=solution)),
            names=(),
            secret=b"bench",
        )
        for notebook in usable
    ]


def _warm_up(work: Work, places: _Places) -> None:
    """The first hand-off between two nodes has a check of its own."""
    with _asking(places, "warm-up") as ask:
        analyse(work, _model_settings(places, True, _WARM_UP_TOKENS), ask)


def _measured(name: str, works: Sequence[Work], places: _Places, models: ModelSettings, at_once: int) -> BenchRow:
    with _asking(places, name) as ask, ThreadPoolExecutor(at_once) as pool:
        started = time.monotonic()
        results: list[ModelsResult] = list(pool.map(lambda work: analyse(work, models, ask), works))
        seconds = time.monotonic() - started
    return BenchRow(name=name, seconds=seconds, figures=model_figures(results))


def _model_settings(places: _Places, in_parallel: bool, answer_tokens: int) -> ModelSettings:
    return ModelSettings(
        code_model=places.models["code"],
        feedback_model=places.models["feedback"],
        in_parallel=in_parallel,
        code_tokens=answer_tokens,
        feedback_tokens=answer_tokens,
        text_chars=_TEXT_CHARS,
    )


@contextmanager
def _asking(places: _Places, salt: str) -> Iterator[Ask]:
    with ExitStack() as stack:
        open_ones = {
            layer: stack.enter_context(ClusterEndpoint(config, salt)) for layer, config in places.configs.items()
        }

        def ask(layer: str, number: int, question: Question) -> RawAnswer:
            return open_ones[layer].ask(question)

        yield ask
