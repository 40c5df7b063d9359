"""Layers 3 and 4: what the code model and the feedback model say, through the public client or an OpenAI endpoint."""

from grader.models.analysis import (
    Ask,
    LayerRun,
    ModelsResult,
    Work,
    analyse,
    context_hash,
    prompt_sha,
    prompt_text,
    text_sha,
)
from grader.models.answers import AnswerUnreadable
from grader.models.code_analysis import ItemReading, asked_items, question_hash
from grader.models.consistency import CODE as FEEDBACK_CONTRADICTS
from grader.models.consistency import contradicted_items, contradictions
from grader.models.endpoint import (
    ALL_UP,
    AnswerRefused,
    AnswerTooSlow,
    ClusterEndpoint,
    Endpoint,
    Figures,
    HttpEndpoint,
    ModelsUnavailable,
    Question,
    RawAnswer,
    connect,
    require_models,
)
from grader.models.feedback import Feedback, Improvement, Reflection, Strength
from grader.models.named_evidence import unfounded
from grader.models.settings import ModelSettings

__all__ = [
    "ALL_UP",
    "FEEDBACK_CONTRADICTS",
    "AnswerRefused",
    "AnswerTooSlow",
    "AnswerUnreadable",
    "Ask",
    "ClusterEndpoint",
    "Endpoint",
    "Feedback",
    "Figures",
    "HttpEndpoint",
    "Improvement",
    "ItemReading",
    "LayerRun",
    "ModelSettings",
    "ModelsResult",
    "ModelsUnavailable",
    "Question",
    "RawAnswer",
    "Reflection",
    "Strength",
    "Work",
    "analyse",
    "asked_items",
    "connect",
    "context_hash",
    "contradicted_items",
    "contradictions",
    "prompt_sha",
    "prompt_text",
    "question_hash",
    "require_models",
    "text_sha",
    "unfounded",
]
