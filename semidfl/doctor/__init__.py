"""What a run needs from this machine, looked at one by one: each finding in words, with what to do about it."""

from semidfl.doctor.finding import Finding
from semidfl.doctor.machine import look_at_machine
from semidfl.doctor.network import look_at_certificates, look_at_neighbours, look_at_port

__all__ = ["Finding", "look_at_certificates", "look_at_machine", "look_at_neighbours", "look_at_port"]
