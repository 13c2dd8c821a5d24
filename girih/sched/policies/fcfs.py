"""First come, first served."""

from girih.sched.request_state import RequestState


def order(request: RequestState) -> tuple[int, ...]:
    """Return the request's place: smaller is served earlier and preempted later."""
    return (request.arrival,)
