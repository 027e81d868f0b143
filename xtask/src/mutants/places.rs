//! Where the switch of a change goes: the smallest expression, statement or block of the source whose text may be replaced
//! as a whole.
//!
//! Invariants: what the switch runs is what the changed source would run there. So the text of a node counts only if the
//! changed source has a node of the same extent: `a == b` is none of the places of `a == b && c` at `b`.

use super::rewrite::{Change, Form};
use std::collections::BTreeSet;
use std::ops::Range;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// A replacement of bytes of a source.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Edit {
    /// What is replaced.
    pub range: Range<usize>,
    /// By what.
    pub with: String,
}

/// The changes that the edits of one mutant make in a source; edits that need one switch together are one change.
///
/// # Errors
/// An edit for which there is no place, or after which the source does not parse.
pub fn changes(source: &str, mut edits: Vec<Edit>) -> Result<Vec<Change>, String> {
    let nodes = Nodes::of(source)?;
    edits.sort_by_key(|edit| edit.range.start);
    loop {
        let mut changes: Vec<Change> = Vec::new();
        for edit in &edits {
            changes.push(change(source, &nodes, edit)?);
        }
        let shared = (1..changes.len()).find(|at| {
            let (a, b) = (&changes[at - 1].node, &changes[*at].node);
            a.start < b.end && b.start < a.end
        });
        let Some(at) = shared else { return Ok(changes) };
        let second = edits.remove(at);
        let first = &mut edits[at - 1];
        if second.range.start < first.range.end {
            return Err("two of its changes overlap".to_owned());
        }
        first.with.push_str(&source[first.range.end..second.range.start]);
        first.with.push_str(&second.with);
        first.range.end = second.range.end;
    }
}

fn change(source: &str, nodes: &Nodes, edit: &Edit) -> Result<Change, String> {
    if edit.with.trim().is_empty()
        && let Some(node) = nodes.statements(source, &edit.range)
    {
        return Ok(Change { form: Form::Statement, edit: node.clone(), node, with: String::new() });
    }
    let mut best: Option<Change> = None;
    for edit in [narrowed(source, edit, true), narrowed(source, edit, false)] {
        let mutated = format!("{}{}{}", &source[..edit.range.start], edit.with, &source[edit.range.end..]);
        let others =
            Nodes::of(&mutated).map_err(|error| format!("the changed file does not parse: {error}"))?;
        let found = nodes.places.iter().filter(|(node, _)| {
            let end = (node.end + edit.with.len()).checked_sub(edit.range.len());
            let contains = node.start <= edit.range.start && edit.range.end <= node.end;
            contains && end.is_some_and(|end| others.extents.contains(&(node.start, end)))
        });
        if let Some((node, form)) = found.min_by_key(|(node, _)| node.len())
            && best.as_ref().is_none_or(|best| node.len() < best.node.len())
        {
            best = Some(Change { form: *form, node: node.clone(), edit: edit.range, with: edit.with });
        }
    }
    best.ok_or_else(|| "there is no place for a switch".to_owned())
}

/// The edit without what both texts begin and end with. Where a text is added to the like of it, what they begin with can
/// be taken first or what they end with.
fn narrowed(source: &str, edit: &Edit, is_start_first: bool) -> Edit {
    let (mut old, mut new) = (&source[edit.range.clone()], edit.with.as_str());
    let mut start = edit.range.start;
    for is_start in [is_start_first, !is_start_first] {
        if is_start {
            let same = old.chars().zip(new.chars()).take_while(|(a, b)| a == b);
            let length = same.map(|(letter, _)| letter.len_utf8()).sum();
            (old, new, start) = (&old[length..], &new[length..], start + length);
        } else {
            let same = old.chars().rev().zip(new.chars().rev()).take_while(|(a, b)| a == b);
            let length: usize = same.map(|(letter, _)| letter.len_utf8()).sum();
            (old, new) = (&old[..old.len() - length], &new[..new.len() - length]);
        }
    }
    Edit { range: start..start + old.len(), with: new.to_owned() }
}

/// What a source consists of.
#[derive(Default)]
struct Nodes {
    /// Where a switch can go.
    places: Vec<(Range<usize>, Form)>,
    /// All expressions and blocks, as pairs of offsets.
    extents: BTreeSet<(usize, usize)>,
    /// The statements of each block, and whether each can be left out.
    blocks: Vec<Vec<(Range<usize>, bool)>>,
}

impl Nodes {
    fn of(source: &str) -> Result<Self, String> {
        let file = syn::parse_file(source).map_err(|error| error.to_string())?;
        let mut nodes = Self::default();
        nodes.visit_file(&file);
        Ok(nodes)
    }

    /// The range without the space around it, if whole statements of a block fill it, of which none binds a name.
    fn statements(&self, source: &str, range: &Range<usize>) -> Option<Range<usize>> {
        let text = &source[range.clone()];
        let start = range.start + (text.len() - text.trim_start().len());
        let range = start..start + text.trim().len();
        let fills = |block: &&Vec<(Range<usize>, bool)>| {
            let first = block.iter().position(|(statement, _)| statement.start == range.start);
            let last = block.iter().position(|(statement, _)| statement.end == range.end);
            first.zip(last).is_some_and(|(first, last)| {
                first <= last && block[first..=last].iter().all(|(_, can_be_left_out)| *can_be_left_out)
            })
        };
        (!range.is_empty() && self.blocks.iter().any(|block| fills(&block))).then_some(range)
    }

    fn expression(&mut self, expression: &syn::Expr, form: Form) {
        let range = expression.span().byte_range();
        self.extents.insert((range.start, range.end));
        if is_place_for_a_switch(expression) {
            self.places.push((range, form));
        }
    }

    /// A block or an `if` that cannot stand in brackets: only what is in it is a place.
    fn inside(&mut self, expression: &syn::Expr) {
        let range = expression.span().byte_range();
        self.extents.insert((range.start, range.end));
        self.parts(expression);
    }

    fn parts(&mut self, expression: &syn::Expr) {
        match expression {
            syn::Expr::If(branch) => {
                self.visit_expr(&branch.cond);
                self.visit_block(&branch.then_branch);
                if let Some((_, otherwise)) = &branch.else_branch {
                    self.inside(otherwise);
                }
            }
            syn::Expr::Closure(closure) if !matches!(closure.output, syn::ReturnType::Default) => {
                self.inside(&closure.body);
            }
            _ => visit::visit_expr(self, expression),
        }
    }
}

/// Whether `(if SWITCH { copy } else { original })` can stand for it: not for what is assigned to or borrowed, nor for what
/// binds names, nor for a closure, whose type is its own.
fn is_place_for_a_switch(expression: &syn::Expr) -> bool {
    use syn::Expr;
    match expression {
        Expr::Path(_) | Expr::Field(_) | Expr::Index(_) | Expr::Let(_) | Expr::Closure(_) => false,
        Expr::Block(_) | Expr::Unsafe(_) | Expr::Const(_) | Expr::Paren(_) => false,
        Expr::Unary(unary) => !matches!(unary.op, syn::UnOp::Deref(_)),
        Expr::Binary(binary) => !has_let(expression) && !has_let(&binary.left),
        _ => true,
    }
}

/// Whether a condition binds something.
pub fn has_let(condition: &syn::Expr) -> bool {
    match condition {
        syn::Expr::Let(_) => true,
        syn::Expr::Binary(binary) if matches!(binary.op, syn::BinOp::And(_)) => {
            has_let(&binary.left) || has_let(&binary.right)
        }
        _ => false,
    }
}

impl Visit<'_> for Nodes {
    fn visit_block(&mut self, block: &syn::Block) {
        let (open, close) = (block.brace_token.span.open(), block.brace_token.span.close());
        let range = open.byte_range().end..close.byte_range().start;
        self.extents.insert((range.start, range.end));
        self.places.push((range, Form::Statement));
        let can_be_left_out = |statement: &syn::Stmt| match statement {
            syn::Stmt::Expr(expression, None) => is_block_like(expression),
            syn::Stmt::Expr(_, Some(_)) => true,
            _ => false,
        };
        let statements = block.stmts.iter();
        self.blocks.push(
            statements.map(|statement| (statement.span().byte_range(), can_be_left_out(statement))).collect(),
        );
        visit::visit_block(self, block);
    }

    fn visit_stmt(&mut self, statement: &syn::Stmt) {
        match statement {
            syn::Stmt::Expr(expression, None) if is_block_like(expression) => {
                self.expression(expression, Form::Statement);
                self.parts(expression);
            }
            _ => visit::visit_stmt(self, statement),
        }
    }

    fn visit_arm(&mut self, arm: &syn::Arm) {
        if let Some((_, guard)) = &arm.guard {
            self.visit_expr(guard);
        }
        if matches!(*arm.body, syn::Expr::Block(_)) {
            return self.inside(&arm.body);
        }
        self.visit_expr(&arm.body);
    }

    fn visit_expr(&mut self, expression: &syn::Expr) {
        self.expression(expression, Form::Expression);
        self.parts(expression);
    }

    fn visit_pat(&mut self, _: &syn::Pat) {}
    fn visit_type(&mut self, _: &syn::Type) {}
    fn visit_generics(&mut self, _: &syn::Generics) {}
    fn visit_path_arguments(&mut self, _: &syn::PathArguments) {}
    fn visit_attribute(&mut self, _: &syn::Attribute) {}
}

fn is_block_like(expression: &syn::Expr) -> bool {
    use syn::Expr;
    matches!(expression, Expr::If(_) | Expr::Match(_) | Expr::While(_) | Expr::Loop(_) | Expr::ForLoop(_))
}

#[cfg(test)]
mod tests {
    use super::super::rewrite::rewrite;
    use super::*;

    /// The source after each first text was replaced by the second, behind the switch `on(0)`.
    fn switched(source: &str, edits: &[(&str, &str)]) -> String {
        let edits = edits.iter().map(|(old, new)| {
            let at = source.find(old).expect("it is in the source");
            Edit { range: at..at + old.len(), with: (*new).to_owned() }
        });
        let changes = changes(source, edits.collect()).expect("there is a place");
        let numbered: Vec<_> = changes.iter().map(|change| (0, change)).collect();
        let text = rewrite(source, &numbered, "on").text;
        syn::parse_file(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        text
    }

    #[test]
    fn a_switch_encloses_the_smallest_expression() {
        assert_eq!(
            switched("fn a() { b(c(1), 2) }", &[("c(1), 2", "c(3), 2")]),
            "fn a() { b(c((if on(0) { 3 } else { 1 })), 2) }"
        );
    }

    #[test]
    fn an_expression_is_enclosed_as_the_changed_source_binds_it() {
        assert_eq!(
            switched("fn a() { if b == c { d() } }", &[("b == c {", "b == c && false {")]),
            "fn a() { if (if on(0) { b == c && false } else { b == c }) { d() } }"
        );
        assert_eq!(
            switched("fn a() -> u8 { b() * c() }", &[("c()", "c() + 1")]),
            "fn a() -> u8 { (if on(0) { b() * c() + 1 } else { b() * c() }) }"
        );
    }

    #[test]
    fn statements_that_bind_nothing_are_left_out_as_they_are() {
        assert_eq!(
            switched("fn a() { b(); c(); d(); }", &[(" b(); c();", "")]),
            "fn a() { if on(0) {  } else { b(); c(); } d(); }"
        );
        assert_eq!(
            switched("fn a() { if b { c(); } d(); }", &[("if b { c(); }", "")]),
            "fn a() { if on(0) {  } else { if b { c(); } } d(); }"
        );
    }

    #[test]
    fn a_block_is_enclosed_where_statements_bind_names_or_are_added() {
        assert_eq!(
            switched("fn a() { let b = c(); d(b); }", &[(" let b = c(); d(b);", "")]),
            "fn a() {if on(0) {   } else {  let b = c(); d(b);  }}"
        );
        assert_eq!(
            switched("fn a() -> u8 { b() }", &[("b()", "c(); b()")]),
            "fn a() -> u8 {if on(0) {  c(); b()  } else {  b()  }}"
        );
    }

    #[test]
    fn a_condition_that_binds_names_is_enclosed_with_its_branches() {
        assert_eq!(
            switched("fn a() { if let Some(b) = c { d(b) } e() }", &[("= c {", "= c && false {")]),
            "fn a() { if on(0) { if let Some(b) = c && false { d(b) } } else { if let Some(b) = c { d(b) } } e() }"
        );
    }

    #[test]
    fn an_arm_is_enclosed_with_its_match() {
        assert_eq!(
            switched("fn a() -> u8 { b(match c { D => 1, E => 2 }) }", &[("D =>", "F =>")]),
            "fn a() -> u8 { b((if on(0) { match c { F => 1, E => 2 } } else { match c { D => 1, E => 2 } })) }"
        );
    }

    #[test]
    fn edits_that_need_one_switch_are_one_change() {
        assert_eq!(
            switched("fn a() { { b(); } c(); }", &[(" b();", ""), (" c();", " c(); b();")]),
            "fn a() {if on(0) {  { } c(); b();  } else {  { b(); } c();  }}"
        );
        assert_eq!(
            switched("fn a() { { b(); } c(1); }", &[(" b();", ""), ("1", "2")]),
            "fn a() { { if on(0) {  } else { b(); } } c((if on(0) { 2 } else { 1 })); }"
        );
    }

    #[test]
    fn nothing_is_switched_outside_functions() {
        let edit = |source: &str, old: &str| {
            let at = source.find(old).expect("it is in the source");
            changes(source, vec![Edit { range: at..at + old.len(), with: "B".to_owned() }])
        };
        assert!(edit("struct A;", "A").is_err());
        assert!(edit("fn a() { b( }", "b").is_err());
    }
}
