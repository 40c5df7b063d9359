"""What attempts look like, on folded text: families of patterns, in several languages.

Honest work also speaks of points, scores and errors: each pattern needs an address, an order or a prompt's mark."""

import re

_WHO = r"(?:ai|llm|gpt|chatgpt|language model|grader|grading (?:model|assistant|bot)|auto ?grader|evaluator)"
_RULES = r"(?:instruction|prompt|rule|rubric|guideline|criteri)"
_POINTS = r"(?:point|mark|score|credit|grade)"
_FULL = rf"(?:full|maximum|max|perfect|highest|top) (?:possible )?{_POINTS}"
_STUDENT = r"(?:this|me|us|it|everyone|every|the student|my|them)"

_PATTERNS = {
    "asks to ignore the rules": (
        rf"\b(?:ignore|disregard|forget|override|bypass)\b.{{0,20}}\b(?:all|any|previous|prior|above|earlier|your|the)"
        rf"\b.{{0,30}}\b{_RULES}"
        r"|\b(?:forget|ignore|disregard) everything (?:above|before)|\bskip the grading rules"
        r"|\bignore\w{0,20}instruction"
    ),
    "demands points": (
        rf"\b(?:give|award|assign|grant|deserve)\b.{{0,40}}\b(?:full|100) (?:point|mark|credit|score|grade)"
        rf"|\b(?:award|assign|grant)\b.{{0,30}}\b{_FULL}"
        rf"|\b(?:give|gives|gave) {_STUDENT}\b.{{0,40}}\b{_FULL}"
        rf"|\bgive the (?:maximum|highest) (?:grade|mark)|\bdeserves the (?:maximum|highest) (?:grade|mark)"
        r"|\bgave full marks\b|\bworth full (?:point|mark|credit)"
        r"|\b(?:student|submission|notebook) (?:has )?earned full (?:point|mark|credit)"
        r"|\bmark (?:this|every|all|them|it)\b.{0,20}\bas (?:correct|earned|passed)"
        r"|\banswer (?:only |always |with )?yes\b.{0,40}"
        r"\b(?:confidence|(?:every|all|each)(?: of)?(?: the)?(?: rubric)? (?:item|question))"
        r"|\ball items (?:are )?earned\b|\bchecked everything\b.{0,10}\bfull points"
    ),
    "speaks to the grader": (
        rf"\b(?:dear|hello|hey|attention|note to|message (?:to|for)|if you are an?)\b.{{0,12}}\b{_WHO}\b"
        rf"|\b{_WHO}s? ?[,:] ?(?:you|please|give|award|disregard|ignore|mark)\b"
        rf"|\bgraders? must (?:award|assign|give|ignore|mark|answer)\b"
        r"|\bas an ai\b.{0,20}\byou\b|\binstructor note\b|\bmaintenance mode\b"
    ),
    "plays a role": (
        rf"\b(?:from now on|pretend|you are now|act as)\b.{{0,50}}\b(?:{_WHO}|teacher|professor|without rules)\b"
    ),
    "brings its own rubric": (
        r"\b(?:updated|new|revised|corrected) (?:rubric|grading (?:instruction|rule|criteri)|answer key)"
        r"|\bsupersedes the\b.{0,20}\brubric\b|\bgrading instructions\b.{0,80}\baward\b"
    ),
    "brings its own verdict": (
        r"\bverdict ?(?:is|:) ?(?:yes|earned|pass|correct)|\bstatus ?: ?earned\b"
        r"|\bitem id ?:.{0,40}\b(?:verdict|points|status)\b|\bscore ?: ?\d+.{0,30}\bfeedback ?:"
        r"|\boutput (?:the )?(?:final grade|verdict)\b"
    ),
    "imitates the prompt's marks": (
        r"<\|(?:im ?start|im ?end|start|end|channel|message|system|assistant|user|endoftext)\|>"
        r"|\[/?inst\]|<<sys>>|</?(?:system|student notebook|student submission|submission|rubric)>"
        r"|\bsystem(?: message| prompt)? ?: ?(?:override|ignore|you are|disregard|award)\b"
        r"|\bend of (?:the )?student submission\b|\bassistant ?:.{0,120}\bhuman ?:"
    ),
    "asks for secrets": (
        r"\b(?:repeat|reveal|print|show|leak)\b.{0,25}\b(?:system prompt|your (?:prompt|instructions)|the rubric)"
        r"|\b(?:reveal|leak)\b.{0,25}\bhidden (?:solution|test)"
    ),
    "asks to ignore the rules (other language)": (
        r"\bignor[aeiy]\w*\b.{0,25}\b(?:instruc|istruzion|anweisung|consignes|regeln|reglas|règles)"
        r"|\b(?:olvida|oublie|vergiss|dimentica|esqueça)\b.{0,25}\b(?:instruc|istruzion|anweisung|consignes)"
        r"|忽略.{0,12}(?:指令|指示|说明|规则)|指示.{0,8}無視|игнорируй.{0,30}(?:инструкц|указан|правил)"
        r"|تجاهل.{0,30}(?:التعليمات|الأوامر)|निर्देश.{0,20}(?:अनदेखा|नज़रअंदाज़)|talimat.{0,15}yok say|지시.{0,10}무시"
    ),
    "demands points (other language)": (
        r"\b(?:otorga|asigna|dame|dê|atribua|attribue|donne|assegna|dai)\b.{0,25}"
        r"\b(?:puntuación|puntaje|nota|note|punteggio|pontuação) (?:máxima|maximale|massimo|massima)"
        r"|\b(?:vergib|gib|gebt|geben sie)\b.{0,25}\bvolle punktzahl|给.{0,12}满分|満点.{0,6}(?:付け|与え|くだ)"
        r"|постав\w*.{0,15}максимальн\w* балл|امنح.{0,25}الدرجة الكاملة|पूरे अंक द|tam puan ver|만점.{0,3}(?:주|부여)"
    ),
}
FAMILIES = {name: re.compile(pattern) for name, pattern in _PATTERNS.items()}
