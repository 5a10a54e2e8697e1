"""The scheduler under random loads (tests/support/scheduler_machine.py)."""

from hypothesis import settings
from support.examples import examples
from support.scheduler_machine import SchedulerMachine

TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=examples(150))
