//! Writes the switches of mutants into a source.
//!
//! A mutant's copy of an expression contains no other switch: only one mutant is switched on at a time, so the text
//! grows with the depth of expressions, not with the number of combinations.

use std::cmp::Reverse;
use std::ops::Range;

/// How the switch of a mutant is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// `(if SWITCH { mutated } else { original })`.
    Expression,
    /// `if SWITCH { mutated } else { original }`, where `mutated` may be nothing.
    Statement,
    /// `!SWITCH && original`, where `original` is a `let` in a condition.
    Guard,
    /// `if SWITCH { mutated }` at an empty range.
    Insertion,
}

/// What a mutant changes in a source.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    /// How its switch is written.
    pub form: Form,
    /// The bytes of the source that the switch encloses.
    pub node: Range<usize>,
    /// The bytes that are replaced, inside `node`.
    pub edit: Range<usize>,
    /// What replaces them.
    pub with: String,
}

/// A source with switches.
#[derive(Debug)]
pub struct Rewritten {
    /// The text.
    pub text: String,
    /// Where each mutant is in it.
    pub places: Vec<Place>,
}

/// Where a mutant is in the rewritten text.
#[derive(Debug)]
pub struct Place {
    /// Its number.
    pub number: u32,
    /// The bytes that run only if it is switched on.
    pub copy: Range<usize>,
    /// The bytes of the whole switch, with the original and other mutants of it.
    pub whole: Range<usize>,
    /// It leaves out the end of a borrow: `drop(guard);`.
    pub is_drop: bool,
}

/// A range of the source with its mutants and with the ranges in it.
struct Node<'a> {
    range: Range<usize>,
    mutants: Vec<(u32, &'a Change)>,
    inner: Vec<Node<'a>>,
}

/// Writes the switches of `mutants`, which have numbers; `switch` is the path of the function that reads one.
pub fn rewrite(source: &str, mutants: &[(u32, &Change)], switch: &str) -> Rewritten {
    let mut sorted = mutants.to_vec();
    sorted.sort_by_key(|(number, mutant)| (mutant.node.start, Reverse(mutant.node.end), *number));
    let mut rest = sorted.into_iter().peekable();
    let nodes = nodes(&mut rest, source.len());
    let text = String::with_capacity(source.len() * 4);
    let mut writer = Writer { source, switch, out: Rewritten { text, places: Vec::new() } };
    writer.range(0..source.len(), &nodes);
    writer.out
}

/// The nodes that end at `end` or before.
fn nodes<'a>(
    rest: &mut std::iter::Peekable<std::vec::IntoIter<(u32, &'a Change)>>,
    end: usize,
) -> Vec<Node<'a>> {
    let mut found: Vec<Node<'a>> = Vec::new();
    while let Some(next) = rest.next_if(|(_, mutant)| mutant.node.end <= end) {
        let range = next.1.node.clone();
        let mut node = Node { range: range.clone(), mutants: vec![next], inner: Vec::new() };
        while let Some(same) = rest.next_if(|(_, mutant)| mutant.node == range) {
            node.mutants.push(same);
        }
        node.inner = nodes_within(rest, &range);
        found.push(node);
    }
    found
}

fn nodes_within<'a>(
    rest: &mut std::iter::Peekable<std::vec::IntoIter<(u32, &'a Change)>>,
    range: &Range<usize>,
) -> Vec<Node<'a>> {
    match rest.peek() {
        Some((_, mutant)) if mutant.node.start < range.end => nodes(rest, range.end),
        _ => Vec::new(),
    }
}

struct Writer<'a> {
    source: &'a str,
    switch: &'a str,
    out: Rewritten,
}

impl Writer<'_> {
    fn range(&mut self, range: Range<usize>, nodes: &[Node<'_>]) {
        let mut at = range.start;
        for node in nodes {
            self.out.text.push_str(&self.source[at..node.range.start]);
            self.node(node);
            at = node.range.end;
        }
        self.out.text.push_str(&self.source[at..range.end]);
    }

    fn node(&mut self, node: &Node<'_>) {
        let switch = self.switch;
        let begin = self.out.text.len();
        let first = self.out.places.len();
        let form = node.mutants[0].1.form;
        let is_drop = form == Form::Statement && self.source[node.range.clone()].starts_with("drop(");
        let place = |number, copy| Place { number, copy, whole: 0..0, is_drop };
        if form == Form::Expression {
            self.out.text.push('(');
        }
        for (number, mutant) in &node.mutants {
            let is_first = *number == node.mutants[0].0;
            if form == Form::Guard {
                self.out.text.push_str(&format!("!{switch}({number}) && "));
                self.out.places.push(place(*number, begin..self.out.text.len()));
                continue;
            }
            let otherwise = if is_first || form == Form::Insertion { "" } else { " else " };
            self.out.text.push_str(&format!("{otherwise}if {switch}({number}) {{ "));
            let copied = self.out.text.len();
            self.out.text.push_str(&self.source[node.range.start..mutant.edit.start]);
            self.out.text.push_str(&mutant.with);
            self.out.text.push_str(&self.source[mutant.edit.end..node.range.end]);
            self.out.places.push(place(*number, copied..self.out.text.len()));
            self.out.text.push_str(" }");
        }
        match form {
            Form::Expression | Form::Statement => {
                self.out.text.push_str(" else { ");
                self.range(node.range.clone(), &node.inner);
                self.out.text.push_str(" }");
            }
            Form::Guard | Form::Insertion => self.range(node.range.clone(), &node.inner),
        }
        if form == Form::Expression {
            self.out.text.push(')');
        }
        let whole = begin..self.out.text.len();
        // The inner nodes have set theirs.
        for place in self.out.places[first..].iter_mut().filter(|place| place.whole.is_empty()) {
            place.whole = whole.clone();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::generated::candidates::{Kind, find};
    use super::*;

    /// The mutants of a source: kind, original, mutated.
    fn found(source: &str) -> Vec<(Kind, String, String)> {
        let mut found: Vec<_> = find(source)
            .expect("it parses")
            .into_iter()
            .map(|mutant| (mutant.kind, mutant.original, mutant.mutated))
            .collect();
        found.sort();
        found
    }

    fn mutated(source: &str, kind: Kind) -> Vec<String> {
        found(source).into_iter().filter(|mutant| mutant.0 == kind).map(|mutant| mutant.2).collect()
    }

    /// The rewritten source, which must parse, with the switch as `on`.
    fn rewritten(source: &str) -> String {
        let candidates = find(source).expect("it parses");
        let numbered: Vec<_> = (0..).zip(candidates.iter().map(|candidate| &candidate.change)).collect();
        let out = rewrite(source, &numbered, "on");
        for place in &out.places {
            let copy = &out.text[place.copy.clone()];
            assert!(place.whole.start <= place.copy.start && place.copy.end <= place.whole.end, "{copy}");
        }
        assert_eq!(out.places.len(), candidates.len());
        syn::parse_file(&out.text).unwrap_or_else(|error| panic!("{error}: {}", out.text));
        out.text
    }

    #[test]
    fn operators_are_exchanged() {
        let source = "fn a(x: u8) -> u8 { b(x < c(x) && x + x != x) }";
        assert_eq!(mutated(source, Kind::Comparison).len(), 2);
        assert_eq!(mutated(source, Kind::Logic), ["fn a(x: u8) -> u8 { b(x < c(x) || x + x != x) }"]);
        assert_eq!(mutated(source, Kind::Arithmetic), ["fn a(x: u8) -> u8 { b(x < c(x) && x - x != x) }"]);
    }

    #[test]
    fn a_mutant_contains_no_other_switch() {
        assert_eq!(
            rewritten("fn a(x: u8) -> u8 { x + y * z }"),
            "fn a(x: u8) -> u8 { (if on(0) { x - y * z } else { x + (if on(1) { y / z } else { y * z }) }) }"
        );
    }

    #[test]
    fn several_mutants_of_one_expression_are_one_chain() {
        assert_eq!(
            rewritten("fn a() -> u8 { b(1) }"),
            "fn a() -> u8 { b((if on(0) { 2 } else if on(1) { 0 } else { 1 })) }"
        );
    }

    #[test]
    fn a_condition_is_true_or_false() {
        assert_eq!(
            rewritten("fn a() -> u8 { if b() { c() } else { d() } }"),
            "fn a() -> u8 { if (if on(0) { true } else if on(1) { false } else { b() }) { c() } else { d() } }"
        );
        assert_eq!(
            rewritten("fn a() -> u8 { while b() { c() } }"),
            "fn a() -> u8 { while (if on(0) { false } else { b() }) { c() } }"
        );
        assert_eq!(
            rewritten("fn a() -> u8 { match x { y if b() => c(), _ => d() } }"),
            "fn a() -> u8 { match x { y if (if on(0) { true } else if on(1) { false } else { b() }) => c(), _ => d() } }"
        );
    }

    #[test]
    fn a_binding_condition_is_false_and_its_neighbours_are_true_or_false() {
        assert_eq!(
            rewritten("fn a() -> u8 { if let Some(1) = b() && c() { d() } else { e() } }"),
            "fn a() -> u8 { if !on(0) && let Some(1) = b() && (if on(1) { true } else if on(2) { false } else { c() }) \
             { d() } else { e() } }"
        );
    }

    #[test]
    fn a_call_whose_value_is_unused_is_left_out() {
        let source = "fn a() -> u8 { self.b(); self.c()?; d(); e.f = g; let h = i(); j() }";
        assert_eq!(
            rewritten(source),
            "fn a() -> u8 { if on(0) {  } else { self.b(); } if on(1) {  } else { self.c()?; } if on(2) {  } else { d(); } \
             if on(3) {  } else { e.f = g; } let h = i(); j() }"
        );
    }

    #[test]
    fn a_function_returns_at_once() {
        assert!(rewritten("fn a() -> Result<()> { b() }").contains("{if on(0) { return Ok(()); } b()"));
        assert!(rewritten("fn a() { b() }").contains("{if on(0) { return; } b()"));
        assert_eq!(mutated("fn a() -> bool { b() }", Kind::Return).len(), 2);
        assert!(mutated("fn a() -> Result<u8> { b() }", Kind::Return).is_empty());
        assert!(mutated("fn a() {}", Kind::Return).is_empty());
    }

    #[test]
    fn constants_are_one_larger_or_smaller() {
        assert_eq!(
            mutated("fn a() -> u8 { b(0x10u8) }", Kind::Constant),
            ["fn a() -> u8 { b(15u8) }", "fn a() -> u8 { b(17u8) }"]
        );
        assert_eq!(mutated("fn a() -> u8 { b(c::SIZE, u64::MAX) }", Kind::Constant).len(), 3);
        assert_eq!(mutated("fn a() -> u8 { Vec::with_capacity(SIZE) }", Kind::Constant).len(), 0);
    }

    #[test]
    fn what_the_compiler_evaluates_and_what_tests_use_is_not_changed() {
        for source in [
            "const A: u8 = 1 + 2;",
            "static A: u8 = 1 + 2;",
            "const fn a() -> u8 { 1 + 2 }",
            "#[test] fn a() -> u8 { 1 + 2 }",
            "#[cfg(test)] mod tests { fn a() -> u8 { 1 + 2 } }",
            "#[cfg(target_os = \"none\")] fn a() -> u8 { 1 + 2 }",
            "fn a() -> u8 { const B: u8 = 1 + 2; B::<{ 1 + 2 }>() }",
            "fn a() -> u8 { [0; 1 + 2] }",
            "fn a() -> u8 { debug_assert!(1 + 2 == 3); b }",
            "fn a() -> u8 { match b { 1..=2 => c, _ => d } }",
            "enum A { B = 1 + 2 }",
            "fn a() -> u8 { rare::count(b); c }",
            "fn a() -> u8 { if b > 1 { rare::count(&b.c); } d }",
            "fn a() -> u8 { b.prefetch(c + d * 64); e }",
            "fn a() -> u8 { if b == c && d < e { let f = g(b + 1); h.prefetch(f); } i }",
            "fn a() -> u8 { core::hint::spin_loop(); b }",
            "impl Table { fn prefetch_node(&self) { if b > 1 { c(); } } }",
        ] {
            assert_eq!(found(source), [], "{source}");
        }
        assert_eq!(found("#[cfg(not(target_os = \"none\"))] fn a() -> u8 { b(c + d) }").len(), 1);
    }

    #[test]
    fn a_branch_with_an_effect_is_changed_although_it_prefetches_too() {
        assert_eq!(mutated("fn a() -> u8 { if b() { c.prefetch(d); e() } f }", Kind::Branch).len(), 2);
        assert_eq!(
            mutated("fn a() -> u8 { if b() { c.prefetch(d); } else { e() } f }", Kind::Branch).len(),
            2
        );
    }

    #[test]
    fn a_mutation_point_has_a_switch_already() {
        for source in [
            "fn a() -> u8 { if Point::A.is_active() { b } else { c + d } }",
            "fn a() -> u8 { if !Point::A.is_active() { b + c } d }",
            "fn a() -> u8 { b(c && !Point::A.is_active()) }",
        ] {
            assert_eq!(found(source), [], "{source}");
        }
        let partly = "fn a() -> u8 { if b() && Point::A.is_active() { c } d }";
        assert_eq!(mutated(partly, Kind::Branch).len(), 2);
    }

    #[test]
    fn a_function_is_named_with_its_type() {
        let source = "impl<A> Trait for Log<A> { fn b(&self) -> u8 { c(|d| d + 1) } }";
        assert!(find(source).expect("it parses").iter().all(|mutant| mutant.function == "Log::b"));
    }
}
