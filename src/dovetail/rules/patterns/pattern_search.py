"""Search for one pattern in one graph: loose matches, each verified on its own operands before it is proposed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.fx import Node

from dovetail.ir.graph_module import attribute
from dovetail.ir.nodes import is_projection, returns_tuple
from dovetail.rules.patterns.example_shapes import PatternExample
from dovetail.rules.patterns.match_state import Match, MatchState, NearMiss, Value, same_literal
from dovetail.rules.patterns.matcher import Matcher, TransparentOps
from dovetail.rules.patterns.normalized_graph import NormalizedGraph, normalized_graph_of
from dovetail.rules.patterns.template import Template, has_tensors
from dovetail.rules.rule import Candidate, Decline, Proposal, Refusal, RuleContext

if TYPE_CHECKING:
    from dovetail.rules.patterns.pattern_rule import PatternRule

_MAX_MISSES = 200
_NEAR_MISS_RATIO = 0.5
_MAX_SPAN = 256


class PatternSearch:
    """The occurrences of every form of one rule's pattern in one graph."""

    def __init__(
        self, rule: PatternRule, context: RuleContext, *, near_miss_ratio: float = _NEAR_MISS_RATIO
    ) -> None:
        self.rule, self.context, self.near_miss_ratio = rule, context, near_miss_ratio
        self.graph: NormalizedGraph = context.analysis(normalized_graph_of)
        self.through = TransparentOps(rule.through) if rule.through else None
        self.proposed: set[tuple[int, ...]] = set()
        self.misses: dict[Node, Refusal] = {}
        self.covered: set[int] = set()
        self.matches: list[Match] = []
        self.refused_matches: dict[tuple[int, ...], Refusal] = {}
        # Other forms, and other matches of one form, may repeat an attempt.
        self.attempts: set[Any] = set()

    def run(self) -> Iterator[Proposal]:
        """Yield candidates, refusals of guards, and near-misses where nothing matched."""
        if self.graph.failure:
            yield Refusal(self.rule.name, (), self.graph.failure)
            return
        dtypes = self.graph.dtypes
        for dialect in self.graph.dialects:
            for template in self.rule.variants.loose(dialect, dtypes):
                if self._possible(template):
                    yield from self._look_for(template, dialect)
        yield from self._near_misses()

    def _possible(self, template: Template) -> bool:
        """Whether the graph has enough of the operators for at least a near-miss."""
        calls = self.graph.by_target
        present = sum(min(len(calls.get(target, ())), count) for target, count in template.required.items())
        return present >= self.near_miss_ratio * template.required.total()

    def _look_for(self, template: Template, dialect: str) -> Iterator[Proposal]:
        matcher = self._matcher(template, strict=False)
        roots = [n for target in template.root_targets for n in self.graph.by_target.get(target, ())]
        for root in roots:
            matched = False
            nonconvex: tuple[Candidate, Match] | None = None
            for state in matcher.find(root):
                matched = True
                proposal = self._verify(template, root, state, dialect)
                if isinstance(proposal, Candidate):
                    if not self._is_convex(proposal.members):
                        # Another match, with operands swapped, may be convex.
                        match = self.matches.pop()
                        nonconvex = nonconvex or (proposal, match)
                        continue
                    nonconvex = None
                    yield proposal
                    break
                if isinstance(proposal, Refusal) and proposal.members not in self.refused_matches:
                    self._record_miss(root, proposal)
            if nonconvex is not None:
                self.matches.append(nonconvex[1])
                yield nonconvex[0]
            if not matched and matcher.miss is not None:
                self._record_near_miss(template, root, matcher.miss)

    def _is_convex(self, members: tuple[int, ...]) -> bool:
        """Whether no operation is between members; assumed where these are far apart in the graph."""
        return max(members) - min(members) > _MAX_SPAN or not self.context.index.between(members)

    def _matcher(self, template: Template, *, strict: bool) -> Matcher:
        return Matcher(
            template, strict=strict, constant=self._constant, order=self._order, through=self.through
        )

    def _constant(self, node: Node) -> Tensor | None:
        """Return the tensor of a node, if it is a constant: not a parameter, not a persistent buffer, never written."""
        origin = self.graph.origins.get(node, ())
        real = self.context.nodes[origin[0]] if len(origin) == 1 else node
        if real.op != "get_attr" or self.context.index.dependencies.written.intersection(origin):
            return None
        value = attribute(self.context.gm, cast("str", real.target))
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
            return None
        return None if _is_persistent_buffer(self.context.gm, cast("str", real.target)) else value

    def _verify(self, template: Template, root: Node, state: MatchState, dialect: str) -> Proposal | None:
        """Return a candidate for a loose match, if the pattern traced on its operands matches strictly."""
        values: dict[str, tuple[Any, Any]] = {}
        for name, node in template.operands.items():
            bound = state.operands.get(node)
            if bound is None:
                # Only an alternative that was not chosen reads it.
                values[name] = (node, template.example_value(name))
                continue
            values[name] = (bound, bound.meta.get("val"))
            if values[name][1] is None:
                return self._refusal(state, template, f"the value of '{bound.name}' is unknown", bound)
        refusal: Refusal | None = None
        for example in (template.example, *template.same_form):
            attempt = (dialect, _attempt_key(root, template, example, state))
            if attempt in self.attempts:
                continue
            self.attempts.add(attempt)
            exact = self.rule.variants.exact(example, dialect, values, state)
            loose = state
            if isinstance(exact, str) and (scalars := _scalar_literals(state)) is not None:
                # A number may have been expanded to a list of equal items.
                retried = self.rule.variants.exact(example, dialect, values, scalars)
                loose, exact = (state, exact) if isinstance(retried, str) else (scalars, retried)
            if isinstance(exact, str):
                refusal = refusal or self._refusal(state, template, exact, None)
                continue
            strict = self._matcher(exact, strict=True)
            operands = {
                exact.operands[name]: state.operands[node]
                for name, node in template.operands.items()
                if node in state.operands
            }
            for proof in strict.find(root, operands):
                return self._candidate(exact, proof, loose)
            miss = strict.miss
            reason = miss.reason if miss is not None else "it computes something else"
            refusal = refusal or self._refusal(state, template, reason, miss.at if miss is not None else None)
        return refusal

    def _candidate(self, template: Template, proof: MatchState, loose: MatchState) -> Proposal | None:
        inner = [*proof.nodes.values(), *proof.through]
        members, partly = self.graph.members(inner)
        members |= self._views_of_operands(proof, members)
        members = self._with_parts(self._with_sizes(self._with_views(members)))
        key = tuple(sorted(members))
        if partly is not None:
            whole = self.context.nodes[self.graph.origins[partly][0]].name
            return self._refuse(key, f"only a part of '{whole}' matches", key[0])
        if key in self.proposed:
            return None
        if len(template.outputs) > 1 and (between := self.context.index.between(members)):
            # Independent results can be paired in many ways; only convex matches are meant.
            names = ", ".join(self.context.nodes[i].name for i in sorted(between)[:3])
            return self._refuse(key, f"{names} would be between its operations", min(between))
        written = self._writes_outside(members)
        if written is not None:
            name = self.context.nodes[written].name
            return self._refuse(key, f"'{name}' also writes to memory outside the match", written)
        hidden = next((i for i in key if i in self.graph.hidden_writes), None)
        if hidden is not None:
            name = self.context.nodes[hidden].name
            return self._refuse(key, f"the memory of '{name}' may be written by an opaque operation", hidden)
        excluded = next((i for i in key if i in self.context.barred), None)
        if excluded is not None:
            return self._refuse(key, self.context.barred[excluded], excluded)
        self.proposed.add(key)
        match = self._match(template, proof, loose, key)
        verdict = self.rule.check_guards(match)
        if verdict is not None:
            at = self.context.index.names.get(verdict.place) if verdict.place is not None else None
            return self._refuse(key, verdict.reason, at)
        rule = self.rule
        attrs = rule.attributes(match)
        if isinstance(attrs, Decline):
            return self._refuse(key, attrs.reason, None)
        self.covered.update(key)
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
        """Return a refusal of operations that match, reported even if others there are proposed."""
        count = len(members)
        refusal = Refusal(self.rule.name, members, reason, at, count, count)
        return self.refused_matches.setdefault(members, refusal)

    def _writes_outside(self, members: set[int]) -> int | None:
        """Return a member that writes memory which is not a member's, None without any."""
        effects, at = self.context.index.dependencies.effects, self.context.index.position
        for i in members:
            own = effects.get(i)
            if own is None:
                continue
            if own.state_written:
                return i
            stack = list(own.writes)
            while stack:
                j = at[stack.pop()]
                if j not in members:
                    return i
                source = effects.get(j)
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
            same = [self.context.nodes[i] for i in self.graph.origins.get(bound, ())] or [bound]
            # A no-op view has no node in the normalized graph, but may be what the members read.
            real = next((n for n in same if n in read), same[0])
            operands[name] = Value(real, bound.meta.get("val"), self.context.gm, bound)
        outputs = [self.context.nodes[self.graph.origins[proof.nodes[o]][-1]] for o in template.outputs]
        paths = {self.context.module_path(i) for i in members}
        inner = [*proof.through, *reversed(proof.nodes.values())]
        inner.sort(key=lambda n: self.graph.origins[n][0])
        return Match(
            self.rule.name,
            operands,
            dict(loose.literals),
            tuple(self.context.nodes[i] for i in members),
            tuple(outputs),
            paths.pop() if len(paths) == 1 else "",
            dict(template.example.picks),
            {n: self.context.nodes[self.graph.origins[n][-1]] for n in inner},
        )

    def _views_of_operands(self, proof: MatchState, members: set[int]) -> set[int]:
        """Return no-op views of operands that members read in more than one form: the region would read them twice."""
        nodes, at = self.context.nodes, self.context.index.position
        read = {at[n] for i in members for n in nodes[i].all_input_nodes}
        inner: set[int] = set()
        for bound in set(proof.operands.values()):
            source, *views = self.graph.origins.get(bound, (-1,))
            stack = [i for i in views if i in read]
            if len(stack) + (source in read) < 2:
                continue
            while stack:
                i = stack.pop()
                inner.add(i)
                stack.extend(at[n] for n in nodes[i].all_input_nodes if at[n] in views)
        return inner

    def _with_parts(self, members: set[int]) -> set[int]:
        """Return the members with all projections of their tuples, which move into the region too."""
        nodes, at = self.context.nodes, self.context.index.position
        parts = {
            at[u] for i in members if returns_tuple(nodes[i]) for u in nodes[i].users if is_projection(u)
        }
        return members | parts

    def _with_views(self, members: set[int]) -> set[int]:
        """Return the members with the no-op views and copies between them, which the normalized graph omits."""
        if self.graph.root is self.context.gm or max(members) - min(members) > _MAX_SPAN:
            return members
        omitted = self.context.index.between(members) - self.graph.covered
        return members | {i for i in omitted if has_tensors(self.context.nodes[i].meta.get("val"))}

    def _with_sizes(self, members: set[int]) -> set[int]:
        """Return the members with the sizes they use that depend on members: outside, these would close a cycle."""
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

    def _refusal(self, state: MatchState, template: Template, reason: str, at: Node | None) -> Refusal:
        return self._miss_refusal(template, NearMiss(tuple(state.nodes.values()), reason, at, state.sites))

    def _miss_refusal(self, template: Template, miss: NearMiss) -> Refusal:
        members, _ = self.graph.members(miss.matched)
        count = len(miss.matched)
        total = max(len(template.calls(miss.sites)), count)
        return Refusal(
            self.rule.name, tuple(sorted(members)), miss.reason, self._position(miss.at), count, total
        )

    def _record_near_miss(self, template: Template, root: Node, miss: NearMiss) -> None:
        refusal = self._miss_refusal(template, miss)
        least = max(2, refusal.wanted * self.near_miss_ratio) if self.near_miss_ratio else 0
        if refusal.matched >= least:
            self._record_miss(root, refusal)

    def _record_miss(self, root: Node, refusal: Refusal) -> None:
        """Record a refusal at a root, if it got further than the one recorded."""
        known = self.misses.get(root)
        if known is None or refusal.matched / max(refusal.wanted, 1) > known.matched / max(known.wanted, 1):
            self.misses[root] = refusal

    def _near_misses(self) -> Iterator[Refusal]:
        """Yield refused matches, then near-misses outside the proposed matches, nearest first."""
        yield from self.refused_matches.values()
        missed = [r for r in self.misses.values() if not self.covered.intersection(r.members)]
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
        origin = self.graph.origins.get(node)
        return self.context.order[origin[0]] if origin else -1

    def _position(self, node: Node | None) -> int | None:
        origin = self.graph.origins.get(node) if node is not None else None
        return origin[-1] if origin else None


def nearest_attempt(rule: PatternRule, context: RuleContext) -> Proposal:
    """Return the place where most operations of a pattern matched, however few, and what stopped it.

    A candidate is a place where it matches. If nothing that the pattern returns occurs, the reason names the operators of the pattern that the graph has not.
    """
    search = PatternSearch(rule, context, near_miss_ratio=0.0)
    proposals = list(search.run())
    candidates = [proposal for proposal in proposals if isinstance(proposal, Candidate)]
    if candidates:
        return candidates[0]
    refusals = [proposal for proposal in proposals if isinstance(proposal, Refusal)]
    if refusals:
        return max(refusals, key=lambda r: (r.matched / max(r.wanted, 1), r.matched))
    graph, best = search.graph, Counter[Any]()
    for dialect in graph.dialects:
        for template in rule.variants.loose(dialect, graph.dtypes):
            present = Counter({target: len(nodes) for target, nodes in graph.by_target.items()})
            missing = template.required - present
            if not best or missing.total() < best.total():
                best = missing
    if not best:
        return Refusal(rule.name, (), "the graph has its operators, but not what the pattern returns")
    names = ", ".join(f"'{target}'" for target in best)
    return Refusal(rule.name, (), f"the graph has too few operators for it: {names}")


def _attempt_key(root: Node, template: Template, example: PatternExample, state: MatchState) -> Any:
    """Return all that decides whether the pattern matches at a root."""
    bound = {name: state.operands.get(node) for name, node in template.operands.items()}
    picks = {**example.picks, **state.sites}
    return (
        root,
        example.absent,
        frozenset(picks.items()),
        frozenset((name, node) for name, node in bound.items() if node is not None),
        frozenset((name, repr(value)) for name, value in state.literals.items()),
    )


def _scalar_literals(state: MatchState) -> MatchState | None:
    """Return the state with each list of equal literals as one of them; None without such a list."""
    lists = {n: v for n, v in state.literals.items() if isinstance(v, list) and v}
    equal = {n: v[0] for n, v in lists.items() if all(same_literal(v[0], item) for item in v)}
    return replace(state, literals={**state.literals, **equal}) if equal else None


def _is_persistent_buffer(root: nn.Module, target: str) -> bool:
    """Whether a tensor is in the state dict, from which it may be reloaded."""
    path, _, name = target.rpartition(".")
    owner: Any = attribute(root, path) if path else root
    return name in owner._buffers and name not in owner._non_persistent_buffers_set
