"""An index of a few pages, and random histories of what is done to it."""

from __future__ import annotations

from hypothesis import strategies as st

from ems.config import PolicyName
from ems.pool.core.index import Index
from ems.pool.keys import NO_PARENT
from ems.pool.layout import PageRef
from ems.pool.pages import Page
from ems.pool.policy.seam import make_policy
from tests.pool.brain import chain, key

REF = PageRef(0, 0, 1).pack()


CAPACITY = 12


steps = st.lists(
    st.tuples(st.sampled_from(["save", "save", "use", "evict", "spare", "drop", "resize"]), st.integers(0, 11)),
    max_size=80,
)


CHAINS = [chain("a", 6), chain("b", 4), [*chain("a", 3), *chain("c", 3)], [key("d")]]


class Small:
    """An index of a few pages, and what a plain account says is in it."""

    def __init__(self, name: PolicyName) -> None:
        self.index = Index(make_policy(name))
        self.index.policy.resize(CAPACITY)

    def save(self, keys: list[bytes]) -> None:
        before, pages = bytes(NO_PARENT), []
        for one in keys:
            if self.index.get(one) is None:
                pages.append(self.index.insert(one, REF, before))
            before = one
        self.index.publish(pages)

    def use(self, keys: list[bytes]) -> None:
        self.index.use(self.index.leading(keys))

    def evict(self, count: int = 1) -> list[bytes]:
        left: list[bytes] = []
        for _ in range(4 * len(self.index)):
            page = self.index.policy.first()
            if page is None or len(left) == count:
                break
            if page.suffixes is not None:
                self.index.policy.spare(page)
                continue
            left.append(page.key)
            self.index.discard(page)
        return left

    def do(self, step: str, number: int) -> list[bytes]:
        keys = CHAINS[number % len(CHAINS)]
        if step == "save":
            self.save(keys[: number // 2 + 1])
        elif step == "use":
            self.use(keys[: number // 2 + 1])
        elif step == "evict":
            return self.evict(number // 3)
        elif step == "resize":
            self.index.policy.resize((number + 1) * 3)
        elif (page := self.index.policy.first()) is not None:
            if step == "spare":
                self.index.policy.spare(page)
            else:
                leaf: Page = page
                while leaf.suffixes is not None:
                    leaf = min(leaf.children(), key=lambda one: one.key)
                self.index.discard(leaf)
        return []
