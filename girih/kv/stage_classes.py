"""Stages -> stage classes: stages whose pools are used alike, page for page, although a page has other bytes on each.

Stages form a class if they have the same groups and one number of pages per slab serves each of them almost as well as
its own best. Every stage of a class then borrows and gives back the same slabs in the same order, so that the engine
core counts pages once for all of them. Requests pass through all stages, so that the least of the slab counts decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from girih.kv.capacity import max_request_tokens
from girih.kv.config import KVCacheConfig
from girih.kv.stage_plan import Choice, StagePlanner

MERGE_SCORE = 0.99  # what a stage must keep of its own best score to join a class


@dataclass(frozen=True)
class Member:
    """A stage in a class.

    Args:
        planner: the stage.
        best_score: of the layout that it would choose alone.
        choice: its layout in the class.
    """

    planner: StagePlanner
    best_score: float
    choice: Choice

    def like(self, layout: KVCacheConfig, max_model_len: int) -> Member | None:
        """Return the member with the pages per slab of `layout`, or None if that costs it too much."""
        choice = self.planner.choose_like(layout, max_model_len)
        if choice is None or choice.score < MERGE_SCORE * self.best_score:
            return None
        return replace(self, choice=choice)


@dataclass(frozen=True)
class StageClass:
    """Stages that share a layout.

    Args:
        members: the stages.
    """

    members: tuple[Member, ...]

    @property
    def tightest(self) -> Member:
        """Return the stage that has room for the fewest slabs."""
        return min(self.members, key=lambda member: member.choice.layout.num_slabs)

    @property
    def layout(self) -> KVCacheConfig:
        """Return the layout on its first stage, with the slabs that every stage has room for."""
        return replace(self.members[0].choice.layout, num_slabs=self.tightest.choice.layout.num_slabs)

    def max_request_tokens(self, limit: int) -> int:
        """Return the longest request in tokens, up to `limit`, that fits on each stage."""
        return max_request_tokens(replace(self.layout, max_model_len=limit))

    def joined_by(self, planner: StagePlanner, choices: Sequence[Choice], max_model_len: int) -> StageClass | None:
        """Return the class with one stage more, or None if no layout is good enough for all.

        Args:
            planner: the stage.
            choices: the layouts that it would choose from alone, best first.
            max_model_len: the length that a lone request must reach, in tokens.
        """
        newcomer = Member(planner, choices[0].score, choices[0])
        if {group.key for group in self.layout.groups} != {group.key for group in choices[0].layout.groups}:
            return None
        # first what the class has, which is the usual case, then whatever the newcomer can live with
        acceptable = (choice.layout for choice in choices if choice.score >= MERGE_SCORE * newcomer.best_score)
        for layout in (self.layout, *acceptable):
            members: list[Member] = []
            for member in (*self.members, newcomer):
                if (adapted := member.like(layout, max_model_len)) is None:
                    break
                members.append(adapted)
            else:
                return StageClass(tuple(members))
        return None


def form_classes(planners: Sequence[StagePlanner], max_model_len: int) -> list[StageClass] | None:
    """Choose every stage's layout, and put stages into one class where a layout serves them all.

    Args:
        planners: the stages in order.
        max_model_len: the length that a lone request must reach on every stage, in tokens.

    Returns:
        The classes in the order of their first stages; None if the request does not fit on some stage.
    """
    classes: list[StageClass] = []
    for planner in planners:
        choices = planner.choices(max_model_len)
        if not choices:
            return None
        for index, stage_class in enumerate(classes):
            if (joined := stage_class.joined_by(planner, choices, max_model_len)) is not None:
                classes[index] = joined
                break
        else:
            classes.append(StageClass((Member(planner, choices[0].score, choices[0]),)))
    return classes
