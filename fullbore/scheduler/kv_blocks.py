"""KV blocks: one allocator for all stages, with a prefix cache over full blocks.

Every stage has the same number of blocks and the same block ids, because only the driver allocates. A freed block may
be reused at once: stages execute micro-batches in order, so a later plan's writes come after every earlier read.
"""

from __future__ import annotations

from collections import OrderedDict

ROOT = 0  # content id of the empty prefix


class BlockPool:
    """Reference-counted KV blocks; unreferenced blocks with known content stay findable until they are needed.

    Content is identified exactly, without hashing collisions: a full block's key is (content id of the block before
    it, its tokens), and each distinct key has one content id. Ids are never reused, so a stale parent matches nothing.
    """

    def __init__(self, num_blocks: int, page_size: int, enable_prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.page_size = page_size
        self.enable_prefix_cache = enable_prefix_cache
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._key_of_block: list[tuple[int, tuple[int, ...]] | None] = [None] * num_blocks
        self._cached: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # key -> (block, content id)
        self._evictable: OrderedDict[int, None] = OrderedDict()  # unreferenced cached blocks, least recently used first
        self._next_content = ROOT + 1

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, cached but unreferenced ones included."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        """Blocks that some request holds."""
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` blocks, evicting least recently used cached ones; None (and no change) if there are too few."""
        if count > self.num_free:
            return None
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Gives back one reference to each block. The tail becomes evictable first, so that prefixes live longest."""
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise AssertionError(f"KV block {block} released more often than taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._key_of_block[block] is None:
                    self._free.append(block)
                else:
                    self._evictable[block] = None

    def match_prefix(self, tokens: list[int], max_tokens: int) -> tuple[list[int], int]:
        """Finds and references the longest cached run of full blocks covering at most `max_tokens` leading tokens.

        Returns:
            The blocks, and the content id of the last of them (ROOT if none), to be passed to `register`.
        """
        blocks: list[int] = []
        parent = ROOT
        if self.enable_prefix_cache:
            size = self.page_size
            for start in range(0, max_tokens - size + 1, size):
                found = self._cached.get((parent, tuple(tokens[start : start + size])))
                if found is None:
                    break
                block, parent = found
                if self._references[block] == 0:
                    del self._evictable[block]
                self._references[block] += 1
                blocks.append(block)
        return blocks, parent

    def register(self, block: int, parent: int, tokens: list[int]) -> int:
        """Makes a full block findable; called when the micro-batch that fills it is launched. Returns its content id.

        If equal content is cached already, that block stays the findable one and this one remains private.
        """
        key = (parent, tuple(tokens))
        found = self._cached.get(key)
        if found is not None:
            return found[1]
        content = self._next_content
        self._next_content += 1
        self._cached[key] = (block, content)
        self._key_of_block[block] = key
        return content

    def forget(self, blocks: list[int]) -> None:
        """Makes blocks, held by some request, findable no more: their content is not to be trusted."""
        for block in blocks:
            self._remove_key(block)

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        self._remove_key(block)
        return block

    def _remove_key(self, block: int) -> None:
        key = self._key_of_block[block]
        if key is not None:
            del self._cached[key]
            self._key_of_block[block] = None
