"""The checks of the exercises: in each file ``check(learner) -> str`` says what works, or raises ``Wrong``."""
