"""``tritonllm tutorial``: lessons that run the real engine on the demo model, ask, and check (docs/tutorial.md).

``lesson.py`` says what a lesson is made of, ``lessons/`` has one file for each, ``lab.py`` runs the engine for them.
``session.py`` is the conversation, ``screen.py`` the terminal, ``progress.py`` what outlasts it. ``solutions/`` has the
exercises' solutions with their holes marked, and ``checks/`` what checks a learner's.
"""
