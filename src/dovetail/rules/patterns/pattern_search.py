"""One pattern looked for in one context: loose finds, each proven on its own operands before it is proposed."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

from torch import Tensor, nn
from torch.fx import Node

from dovetail.ir.graph_module import attribute
from dovetail.ir.nodes import is_projection, returns_tuple
from dovetail.rules.patterns.example_shapes import Parameters, PatternExample
from dovetail.rules.patterns.match_state import Match, MatchState, NearMiss, Value, same_literal
from dovetail.rules.patterns.matcher import Matcher, TransparentOps
from dovetail.rules.patterns.normalized_graph import NormalizedGraph, normalized_graph_of
from dovetail.rules.patterns.template import Template, has_tensors
from dovetail.rules.patterns.variants import Variants
from dovetail.rules.rule import Candidate, Decline, Proposal, Refusal, RuleContext

_MAX_MISSES = 200
_NEAR_MISS_RATIO = 0.5
_MAX_SPAN = 256


class Pattern(Protocol):
    """What a search needs to know of a rule whose pattern it looks for."""

    name: str
    kind: str
    priority: int
    version: int
    escapes: str
    through: frozenset[str]
    parameters: Parameters
    variants: Variants

    def judge(self, match: Match) -> Decline | None: ...

    def attributes(self, match: Match) -> dict[str, Any] | Decline: ...

    def results(self, match: Match) -> Sequence[Node | None]: ...


class PatternSearch:
    """Looks for every form of one rule's pattern in one context."""

    def __init__(self, rule: Pattern, context: RuleContext) -> None:
        self.rule, self.context = rule, context
        self.shadow: NormalizedGraph = context.analysis(normalized_graph_of)
        self.seen: set[tuple[int, ...]] = set()
        self.misses: dict[Node, Refusal] = {}
        self.hit: set[int] = set()
        self.matches: list[Match] = []
        self.firm: dict[tuple[int, ...], Refusal] = {}
        # Other forms, and other ways through one, may come to what was tried already.
        self.claims: set[Any] = set()

    def run(self) -> Iterator[Proposal]:
        """Candidates, guards' refusals, and near-misses where nothing was found."""
        if self.shadow.why_none:
            yield Refusal(self.rule.name, (), self.shadow.why_none)
            return
        dtypes = self.shadow.dtypes
        for dialect in self.shadow.dialects:
            for template in self.rule.variants.loose(dialect, dtypes):
                if self._possible(template):
                    yield from self._look_for(template, dialect)
        yield from self._near_misses()

    def _possible(self, template: Template) -> bool:
        """Whether the graph has enough of the operators for at least a near-miss."""
        have = self.shadow.by_target
        there = sum(min(len(have.get(target, ())), count) for target, count in template.needed.items())
        return there >= _NEAR_MISS_RATIO * template.needed.total()

    def _look_for(self, template: Template, dialect: str) -> Iterator[Proposal]:
        through = TransparentOps(self.rule.through) if self.rule.through else None
        matcher = self._matcher(template, strict=False, through=through)
        roots = [n for target in template.root_targets for n in self.shadow.by_target.get(target, ())]
        for root in roots:
            done = False
            waiting: tuple[Candidate, Match] | None = None
            for found in matcher.find(root):
                done = True
                proposal = self._proven(template, root, found, dialect, through)
                if isinstance(proposal, Candidate):
                    if self._has_gaps(proposal.members):
                        # With the operands the other way round nothing may lie between.
                        match = self.matches.pop()
                        waiting = waiting or (proposal, match)
                        continue
                    waiting = None
                    yield proposal
                    break
                if isinstance(proposal, Refusal) and proposal.members not in self.firm:
                    self._note(root, proposal)
            if waiting is not None:
                self.matches.append(waiting[1])
                yield waiting[0]
            if not done and matcher.miss is not None:
                self._note_miss(template, root, matcher.miss)

    def _has_gaps(self, members: tuple[int, ...]) -> bool:
        """Whether something lies between operations; not asked where they are listed far apart."""
        return max(members) - min(members) <= _MAX_SPAN and bool(self.context.index.between(members))

    def _matcher(self, template: Template, *, strict: bool, through: TransparentOps | None) -> Matcher:
        stage = template.stage
        same_number = stage.same_number if stage is not None else operator.eq
        return Matcher(
            template,
            strict=strict,
            constant=self._constant,
            order=self._order,
            through=through,
            same_number=same_number,
        )

    def _constant(self, node: Node) -> Tensor | None:
        """The tensor that a node names, if nothing changes it: no parameter, no saved buffer, never written."""
        origin = self.shadow.origins.get(node, ())
        real = self.context.nodes[origin[0]] if len(origin) == 1 else node
        if real.op != "get_attr" or self.context.index.dependencies.written.intersection(origin):
            return None
        value = attribute(self.context.gm, cast("str", real.target))
        plain = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        return (
            value if plain and not _is_persistent_buffer(self.context.gm, cast("str", real.target)) else None
        )

    def _proven(
        self, template: Template, root: Node, found: MatchState, dialect: str, through: TransparentOps | None
    ) -> Proposal | None:
        """The candidate for what was found, if the pattern traced on these very operands is what stands there."""
        values: dict[str, tuple[Any, Any]] = {}
        for name, node in template.operands.items():
            bound = found.operands.get(node)
            if bound is None:
                # Only an alternative that was not taken needs it.
                values[name] = (node, template.example_value(name))
                continue
            values[name] = (bound, bound.meta.get("val"))
            if values[name][1] is None:
                return self._refusal(
                    found, template, f"nothing is known of the value of '{bound.name}'", bound
                )
        refusal: Refusal | None = None
        for example in (template.example, *template.alike):
            claim = (dialect, _attempt_key(root, template, example, found))
            if claim in self.claims:
                continue
            self.claims.add(claim)
            exact = self.rule.variants.exact(example, dialect, values, found)
            shown = found
            if isinstance(exact, str) and (single := _scalar_literals(found)) is not None:
                # A literal that fills a list may have been given for each item.
                again = self.rule.variants.exact(example, dialect, values, single)
                shown, exact = (found, exact) if isinstance(again, str) else (single, again)
            if isinstance(exact, str):
                refusal = refusal or self._refusal(found, template, exact, None)
                continue
            strict = self._matcher(exact, strict=True, through=through)
            operands = {
                exact.operands[name]: found.operands[node]
                for name, node in template.operands.items()
                if node in found.operands
            }
            for proof in strict.find(root, operands):
                return self._candidate(exact, proof, shown)
            miss = strict.miss
            reason = miss.reason if miss is not None else "it is another computation"
            refusal = refusal or self._refusal(found, template, reason, miss.at if miss is not None else None)
        return refusal

    def _candidate(self, template: Template, proof: MatchState, loose: MatchState) -> Proposal | None:
        inner = [*proof.nodes.values(), *proof.through]
        members, partly = self.shadow.members(inner)
        members |= self._views_of_operands(proof, members)
        members = self._with_parts(self._with_sizes(self._with_views(members)))
        key = tuple(sorted(members))
        if partly is not None:
            whole = self.context.nodes[self.shadow.origins[partly][0]].name
            return self._refuse(key, f"only a part of '{whole}' matches", key[0])
        if key in self.seen:
            return None
        if len(template.outputs) > 1 and (between := self.context.index.between(members)):
            # Results side by side can be paired in many ways; only one that is convex is what is meant.
            names = ", ".join(self.context.nodes[i].name for i in sorted(between)[:3])
            return self._refuse(key, f"{names} would lie between its operations", min(between))
        written = self._writes_outside(members)
        if written is not None:
            name = self.context.nodes[written].name
            return self._refuse(key, f"'{name}' also writes to memory outside the match", written)
        unseen = next((i for i in key if i in self.shadow.unseen), None)
        if unseen is not None:
            name = self.context.nodes[unseen].name
            return self._refuse(
                key, f"the memory of '{name}' is written by what cannot be looked into", unseen
            )
        barred = next((i for i in key if i in self.context.barred), None)
        if barred is not None:
            return self._refuse(key, self.context.barred[barred], barred)
        self.seen.add(key)
        match = self._match(template, proof, loose, key)
        verdict = self.rule.judge(match)
        if verdict is not None:
            at = self.context.index.names.get(verdict.place) if verdict.place is not None else None
            return self._refuse(key, verdict.reason, at)
        rule = self.rule
        attrs = rule.attributes(match)
        if isinstance(attrs, Decline):
            return self._refuse(key, attrs.reason, None)
        self.hit.update(key)
        self.matches.append(match)
        at = self.context.index.position
        return Candidate(
            rule.name,
            rule.kind,
            key,
            attrs,
            rule.version,
            rule.escapes,
            rule.priority,
            arguments={name: at[v.node] for name, v in match.operands.items() if v is not None},
            results=tuple(None if node is None else at[node] for node in rule.results(match)),
        )

    def _refuse(self, members: tuple[int, ...], reason: str, at: int | None) -> Refusal:
        """A refusal of what does match: told whatever else was found there."""
        count = len(members)
        refusal = Refusal(self.rule.name, members, reason, at, count, count)
        return self.firm.setdefault(members, refusal)

    def _writes_outside(self, members: set[int]) -> int | None:
        """A member that writes to what is no member's: more than the pattern computes."""
        found, at = self.context.index.dependencies.effects, self.context.index.position
        for i in members:
            told = found.get(i)
            if told is None:
                continue
            if told.state_written:
                return i
            stack = list(told.writes)
            while stack:
                j = at[stack.pop()]
                if j not in members:
                    return i
                source = found.get(j)
                if source is not None and source.aliases and not (source.writes or source.assumed_aliases):
                    stack.extend(source.aliases)
        return None

    def _match(
        self, template: Template, proof: MatchState, loose: MatchState, members: tuple[int, ...]
    ) -> Match:
        operands: dict[str, Value | None] = dict.fromkeys(self.rule.parameters.operands)
        read = {n for i in members for n in self.context.nodes[i].all_input_nodes}
        for name, node in template.operands.items():
            if node not in proof.operands:
                continue
            bound = proof.operands[node]
            same = [self.context.nodes[i] for i in self.shadow.origins.get(bound, ())] or [bound]
            # A view that changes nothing is no node of its own in the shadow, but may be what the members read.
            real = next((n for n in same if n in read), same[0])
            operands[name] = Value(real, bound.meta.get("val"), self.context.gm, bound)
        outputs = [self.context.nodes[self.shadow.origins[proof.nodes[o]][-1]] for o in template.outputs]
        paths = {self.context.module_path(i) for i in members}
        inner = [*proof.through, *reversed(proof.nodes.values())]
        inner.sort(key=lambda n: self.shadow.origins[n][0])
        return Match(
            self.rule.name,
            operands,
            dict(loose.literals),
            tuple(self.context.nodes[i] for i in members),
            tuple(outputs),
            paths.pop() if len(paths) == 1 else "",
            dict(template.example.picks),
            {n: self.context.nodes[self.shadow.origins[n][-1]] for n in inner},
        )

    def _views_of_operands(self, proof: MatchState, members: set[int]) -> set[int]:
        """Views that change nothing, where members read an operand by several: the operand would have several names."""
        nodes, at = self.context.nodes, self.context.index.position
        read = {at[n] for i in members for n in nodes[i].all_input_nodes}
        found: set[int] = set()
        for bound in set(proof.operands.values()):
            source, *views = self.shadow.origins.get(bound, (-1,))
            stack = [i for i in views if i in read]
            if len(stack) + (source in read) < 2:
                continue
            while stack:
                i = stack.pop()
                found.add(i)
                stack.extend(at[n] for n in nodes[i].all_input_nodes if at[n] in views)
        return found

    def _with_parts(self, members: set[int]) -> set[int]:
        """The members and every part of what they return several values: those move along."""
        nodes, at = self.context.nodes, self.context.index.position
        parts = {
            at[u] for i in members if returns_tuple(nodes[i]) for u in nodes[i].users if is_projection(u)
        }
        return members | parts

    def _with_views(self, members: set[int]) -> set[int]:
        """The members and what lies between them that patterns do not see: views and copies that change nothing."""
        if self.shadow.root is self.context.gm or max(members) - min(members) > _MAX_SPAN:
            return members
        unseen = self.context.index.between(members) - self.shadow.places
        return members | {i for i in unseen if has_tensors(self.context.nodes[i].meta.get("val"))}

    def _with_sizes(self, members: set[int]) -> set[int]:
        """The members and the sizes they use that are read from members: outside, they would make a cycle."""
        nodes, at = self.context.nodes, self.context.index.position
        stack = [u for i in members for u in nodes[i].users if not has_tensors(u.meta.get("val"))]
        reached: set[int] = set()
        while stack:
            node = stack.pop()
            i = at[node]
            if i in reached or i in members or node.op == "output" or "val" not in node.meta:
                continue
            reached.add(i)
            stack.extend(u for u in node.users if not has_tensors(u.meta.get("val")))
        if not reached:
            return members
        needed: set[int] = set()
        stack = [n for i in members for n in nodes[i].all_input_nodes]
        while stack:
            i = at[stack.pop()]
            if i in reached and i not in needed:
                needed.add(i)
                stack.extend(nodes[i].all_input_nodes)
        return members | needed

    def _refusal(self, found: MatchState, template: Template, reason: str, at: Node | None) -> Refusal:
        members, _ = self.shadow.members(found.nodes.values())
        wanted = max(len(template.calls(found.sites)), len(found.nodes))
        return Refusal(
            self.rule.name, tuple(sorted(members)), reason, self._position(at), len(found.nodes), wanted
        )

    def _note_miss(self, template: Template, root: Node, miss: NearMiss) -> None:
        if len(miss.found) < 2:
            return
        wanted = max(len(template.calls(miss.sites)), len(miss.found))
        if len(miss.found) < wanted * _NEAR_MISS_RATIO:
            return
        members, _ = self.shadow.members(miss.found)
        self._note(
            root,
            Refusal(
                self.rule.name,
                tuple(sorted(members)),
                miss.reason,
                self._position(miss.at),
                len(miss.found),
                wanted,
            ),
        )

    def _note(self, root: Node, refusal: Refusal) -> None:
        """Keep the attempt at a root that got furthest."""
        known = self.misses.get(root)
        if known is None or refusal.matched / max(refusal.wanted, 1) > known.matched / max(known.wanted, 1):
            self.misses[root] = refusal

    def _near_misses(self) -> Iterator[Refusal]:
        """What matched and was refused, then what came near and is not part of a match, the nearest first."""
        yield from self.firm.values()
        missed = [r for r in self.misses.values() if not self.hit.intersection(r.members)]
        missed.sort(key=lambda r: (-r.matched, r.wanted, [self.context.order[i] for i in r.members[:1]]))
        yield from missed[:_MAX_MISSES]
        if len(missed) > _MAX_MISSES:
            reasons = Counter(r.reason for r in missed[_MAX_MISSES:])
            reason, count = reasons.most_common(1)[0]
            last = missed[_MAX_MISSES]
            yield replace(
                last, reason=f"{reason} (and {len(missed) - _MAX_MISSES} more, {count} of them like it)"
            )

    def _order(self, node: Node) -> int:
        origin = self.shadow.origins.get(node)
        return self.context.order[origin[0]] if origin else -1

    def _position(self, node: Node | None) -> int | None:
        origin = self.shadow.origins.get(node) if node is not None else None
        return origin[-1] if origin else None


def _attempt_key(root: Node, template: Template, example: PatternExample, found: MatchState) -> Any:
    """All that decides whether the pattern stands at a root."""
    bound = {name: found.operands.get(node) for name, node in template.operands.items()}
    picks = {**example.picks, **found.sites}
    return (
        root,
        example.absent,
        frozenset(picks.items()),
        frozenset((name, node) for name, node in bound.items() if node is not None),
        frozenset((name, repr(value)) for name, value in found.literals.items()),
    )


def _scalar_literals(found: MatchState) -> MatchState | None:
    """What was found, with each list of equal literals as one of them; None if there is no such list."""
    lists = {n: v for n, v in found.literals.items() if isinstance(v, list) and v}
    equal = {n: v[0] for n, v in lists.items() if all(same_literal(v[0], item) for item in v)}
    return replace(found, literals={**found.literals, **equal}) if equal else None


def _is_persistent_buffer(root: nn.Module, target: str) -> bool:
    """Whether a tensor is part of a model's state, which may be loaded anew."""
    path, _, name = target.rpartition(".")
    owner: Any = attribute(root, path) if path else root
    return name in owner._buffers and name not in owner._non_persistent_buffers_set
