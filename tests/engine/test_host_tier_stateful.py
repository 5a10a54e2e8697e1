"""The scheduler with a tier in the host's memory (tests/support/host_machine.py)."""

from hypothesis import settings
from support.examples import examples
from support.host_machine import MachineWithHost

TestMachineWithHost = MachineWithHost.TestCase
TestMachineWithHost.settings = settings(max_examples=examples(100))
