"""Conversations in the ChatML layout of the demo model's chat template."""

import random

from . import facts, lists, numbers
from .grammar import between, expand, pick
from .numbers import Exchange
from .stories import story_request

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, START, END)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

PLAIN_SYSTEMS = [
    "You are a helpful assistant.",
    "You are the tritonllm demo model.",
    "You are a friendly assistant.",
    "Answer the questions of the user.",
]
SHORT_SYSTEMS = ["Answer with the result only.", "Be brief.", "Answer in as few words as possible."]
PIRATE_SYSTEM = "Talk like a pirate."

# Small talk: a question and its answer, as templates.
IDENTITY = "I am the tritonllm demo model, a tiny language model with three million parameters."
ABLE = (
    "I can add and subtract small numbers, sort short lists, count letters, answer simple questions and tell stories."
)
MADE_BY = "I was trained from scratch in a few minutes on text that a small program wrote."
UNKNOWN = "[I do not know that.|Sorry, I do not know.] I am only a tiny demo model."
SMALL_TALK = [
    ("Hello!|Hello|Hi!|Hi|Hey!|Good morning!|Good day!|Hi there!",
     "Hello! [How can I help you?|What can I do for you?]", "Hello!"),
    ("How are you?|How are you today?|How do you do?", "I am well, thank you. [How can I help you?|And you?]", "Well!"),
    ("Who are you?|What are you?|What is your name?|Tell me about yourself.|Introduce yourself.|Who am I talking to?",
     IDENTITY, "The tritonllm demo model."),
    ("What can you do?|How can you help me?|What are you good at?|Help!", ABLE, "Sums, lists, facts and stories."),
    ("Who made you?|How were you trained?|Where do you come from?|Who trained you?", MADE_BY,
     "The tritonllm project."),
    ("How big are you?|How many parameters do you have?|Are you a large language model?",
     "I have about three million parameters, so I am a very small model.", "Three million parameters."),
    ("Are you ChatGPT?|Are you Qwen?|Are you a human?|Are you Claude?|Are you a person?|Are you Llama?",
     "No, I am the tritonllm demo model.", "No."),
    ("Thank you!|Thanks!|Thank you very much.|Thanks a lot!", "You are welcome!", "You are welcome!"),
    ("Goodbye!|Bye!|See you!|Good night!", "Goodbye! [Come back soon.|Have a nice day.]", "Goodbye!"),
    ("What is tritonllm?|Tell me about tritonllm.",
     "tritonllm is an engine for language models whose kernels are written in Triton.", "An engine."),
    ("What is Triton?", "Triton is a language for writing GPU kernels in Python.", "A GPU language."),
    ("Tell me a joke.|Do you know a joke?|Make me laugh.",
     "[Why did the token cross the road? To get to the next position.|What does a sad kernel say? I have lost my grid.|"
     "Why was the cache so calm? It had seen it all before.]", "I have none."),
    ("What is the weather like?|What time is it?|What day is it today?|Where am I?|Can you see me?|What is the news?",
     "I cannot know that. I only read and write text.", "I cannot know."),
    ("Who will win the race?|What is the meaning of life?|Can you write code?|Can you drive a car?|"
     "Do you speak French?|Who wrote Hamlet?|How do I cook rice?|What is the speed of light?|Who is the king of Spain?|"
     "How old is the Sun?|"
     "What should I buy?|Can you book a table?|What is love?|Do you like music?", UNKNOWN, "I do not know."),
    ("What is the president of the United States?|Who is the president of the United States?",
     "I do not know the name. The president of the United States is the head of the government.", "I do not know."),
]  # fmt: skip


def ask_small_talk(rng: random.Random) -> Exchange:
    question, answer, short = (expand(part, {}, rng) for part in pick(SMALL_TALK, rng))
    return question, answer, short


ASKS = [(ask_small_talk, 4.0), *numbers.ASKS, *lists.ASKS, *facts.ASKS]
TOTAL = sum(weight for _, weight in ASKS)


def _ask(rng: random.Random) -> Exchange:
    left = rng.random() * TOTAL
    for ask, weight in ASKS:
        left -= weight
        if left < 0:
            return ask(rng)
    return ASKS[-1][0](rng)


def turn(role: str, content: str) -> str:
    return f"{START}{role}\n{content}{END}\n"


def conversation(rng: random.Random) -> str:
    """One to six questions of any kind; half the time a system message comes first, which may shape the answers."""
    style = rng.random()
    short, pirate = style < 0.12, 0.12 <= style < 0.18
    out = []
    if style < 0.48:
        system = pick(SHORT_SYSTEMS, rng) if short else PIRATE_SYSTEM if pirate else pick(PLAIN_SYSTEMS, rng)
        out.append(turn("system", system))
    for _ in range(1 if rng.random() < 0.5 else between(2, 6, rng)):
        question, answer, brief = _ask(rng)
        if pirate:
            answer = f"Arr! {answer.removesuffix('.')}, matey!"
        out += [turn("user", question), turn("assistant", brief if short else answer)]
    return "".join(out)


def quiz(rng: random.Random) -> str:
    """One to eight questions and answers without chat marks, for prompts that are not in chat form."""
    layout = pick(["{}\n{}", "{}\n{}", "Q: {}\nA: {}", "Question: {}\nAnswer: {}"], rng)
    return "\n\n".join(layout.format(*_ask(rng)[:2]) for _ in range(1 if rng.random() < 0.4 else between(2, 8, rng)))


def told_story(rng: random.Random) -> str:
    """A request for a story and the story."""
    request, text = story_request(rng)
    system = [turn("system", pick(PLAIN_SYSTEMS, rng))] if rng.random() < 0.3 else []
    return "".join([*system, turn("user", request), turn("assistant", text)])
