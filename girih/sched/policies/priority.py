"""Smaller priority numbers first; first come, first served among equals."""

from girih.sched.request_state import RequestState


def order(request: RequestState) -> tuple[int, ...]:
    """Return the request's place: smaller is served earlier and preempted later."""
    return (request.priority, request.arrival)
