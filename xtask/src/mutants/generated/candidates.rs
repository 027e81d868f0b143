//! The mutants of a source file: which expressions and statements can be changed, and how.
//!
//! Invariants: nothing that the compiler evaluates itself is changed (constants, `const fn`, patterns, types,
//! attributes, macros), nothing that belongs to tests, and no mutation point, which has a switch already. A mutant may
//! still not compile: the build drops those.

use crate::mutants::places::has_let;
use crate::mutants::rewrite::{Change, Form};
use crate::tidy::is_for_tests;
use std::ops::Range;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// What a mutant changes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Kind {
    /// `<` is `<=`, `==` is `!=`.
    Comparison,
    /// `+` is `-`, `<<` is `>>`.
    Arithmetic,
    /// `&&` is `||`.
    Logic,
    /// A condition is true, or false, or not negated.
    Branch,
    /// A call, or an assignment to a field, is left out.
    Removed,
    /// A number is one larger or smaller, `true` is `false`.
    Constant,
    /// A function returns at once.
    Return,
}

impl Kind {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Comparison => "comparison",
            Self::Arithmetic => "arithmetic",
            Self::Logic => "logic",
            Self::Branch => "branch",
            Self::Removed => "removed",
            Self::Constant => "constant",
            Self::Return => "return",
        }
    }
}

/// A mutant of a file.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// What it changes.
    pub kind: Kind,
    /// The function, with its type: `Log::append`.
    pub function: String,
    /// What it changes.
    pub change: Change,
    /// The lines around the change, with single spaces.
    pub original: String,
    /// The same lines after the change.
    pub mutated: String,
}

/// Calls whose arguments are hints about sizes: a wrong one costs time or memory only.
const HINTS: [&str; 4] = ["with_capacity", "reserve", "try_reserve", "try_reserve_exact"];

/// Calls that have no effect in a product: prefetches, pauses while spinning, moments at which a model schedules, counters of
/// rare paths that only the simulator reads.
const WITHOUT_EFFECT: [&str; 8] = [
    "prefetch",
    "prefetch_further",
    "prefetch_node",
    "load_index_lines",
    "before_shared_access",
    "count",
    "spin_loop",
    "black_box",
];

/// Functions that only prefetch: what they do is a hint to the processor, and nothing depends on it.
const PREFETCHES: [&str; 11] = [
    "Cache::prefetched_lane",
    "Index::prefetch",
    "Index::prefetch_further",
    "Index::touch_all",
    "Lane::prefetch",
    "LaneState::load_index_lines",
    "Lines::prefetch",
    "Table::peek",
    "Table::prefetch_further",
    "Table::prefetch_node",
    "Table::touch_all",
];

/// Finds the mutants of a source.
///
/// # Errors
/// A source that does not parse.
pub fn find(source: &str) -> Result<Vec<Candidate>, String> {
    let file = syn::parse_file(source).map_err(|error| error.to_string())?;
    let mut finder = Finder { source, owner: String::new(), function: None, found: Vec::new() };
    finder.visit_file(&file);
    Ok(finder.found)
}

struct Finder<'a> {
    source: &'a str,
    /// The type of the `impl`, or the trait.
    owner: String,
    /// The name of the function, if this is the body of one that runs.
    function: Option<String>,
    found: Vec<Candidate>,
}

impl Finder<'_> {
    fn text(&self, node: &impl Spanned) -> &str {
        &self.source[node.span().byte_range()]
    }

    fn add(&mut self, kind: Kind, form: Form, node: Range<usize>, edit: Range<usize>, with: &str) {
        let Some(function) = self.function.clone() else { return };
        let begin = self.source[..edit.start].rfind('\n').map_or(0, |at| at + 1);
        let end = self.source[edit.end..].find('\n').map_or(self.source.len(), |at| edit.end + at);
        let original = one_line(&self.source[begin..end]);
        let mutated = format!("{}{with}{}", &self.source[begin..edit.start], &self.source[edit.end..end]);
        let mutated = one_line(&mutated);
        self.found.push(Candidate {
            kind,
            function,
            change: Change { form, node, edit, with: with.to_owned() },
            original,
            mutated,
        });
    }

    fn replace(&mut self, kind: Kind, node: &impl Spanned, with: &str) {
        let range = node.span().byte_range();
        self.add(kind, Form::Expression, range.clone(), range, with);
    }

    fn operator(&mut self, binary: &syn::ExprBinary) {
        let Some((kind, with)) = exchanged(&binary.op) else { return };
        if kind == Kind::Logic
            && (has_let(&binary.left) || has_let(&binary.right) || self.text(binary).contains(".is_active()"))
        {
            return;
        }
        self.add(kind, Form::Expression, binary.span().byte_range(), binary.op.span().byte_range(), with);
    }

    /// The mutants of a condition of an `if` or of a `match` guard; of a loop if `is_loop`, which is never endless.
    fn condition(&mut self, condition: &syn::Expr, is_loop: bool) {
        if let syn::Expr::Let(binding) = condition {
            let range = binding.span().byte_range();
            return self.add(Kind::Branch, Form::Guard, range.clone(), range, "false");
        }
        if let syn::Expr::Binary(binary) = condition
            && has_let(condition)
        {
            self.condition(&binary.left, is_loop);
            return self.condition(&binary.right, is_loop);
        }
        if is_query(condition) {
            return;
        }
        if !is_loop {
            self.replace(Kind::Branch, condition, "true");
        }
        self.replace(Kind::Branch, condition, "false");
    }

    fn function(&mut self, attributes: &[syn::Attribute], signature: &syn::Signature, block: &syn::Block) {
        if !is_live(attributes) || signature.constness.is_some() {
            return;
        }
        let name = signature.ident.to_string();
        let name = if self.owner.is_empty() { name } else { format!("{}::{name}", self.owner) };
        if PREFETCHES.contains(&name.as_str()) {
            return;
        }
        let outer = self.function.replace(name);
        let begin = block.brace_token.span.open().byte_range().end;
        if !block.stmts.is_empty() {
            for value in returned(&signature.output) {
                let with = if value.is_empty() { "return;".to_owned() } else { format!("return {value};") };
                self.add(Kind::Return, Form::Insertion, begin..begin, begin..begin, &with);
            }
        }
        self.visit_block(block);
        self.function = outer;
    }

    fn statement(&mut self, statement: &syn::Stmt) {
        let removable = match statement {
            syn::Stmt::Expr(expression, Some(_)) => is_removable(expression),
            _ => false,
        };
        if removable {
            let range = statement.span().byte_range();
            self.add(Kind::Removed, Form::Statement, range.clone(), range, "");
        }
    }

    fn number(&mut self, literal: &syn::ExprLit) {
        match &literal.lit {
            syn::Lit::Int(number) => {
                let Ok(value) = number.base10_parse::<u128>() else { return };
                let suffix = number.suffix();
                self.replace(Kind::Constant, literal, &format!("{}{suffix}", value + 1));
                if value > 0 {
                    self.replace(Kind::Constant, literal, &format!("{}{suffix}", value - 1));
                }
            }
            syn::Lit::Bool(value) => {
                self.replace(Kind::Constant, literal, if value.value { "false" } else { "true" });
            }
            _ => {}
        }
    }
}

impl Visit<'_> for Finder<'_> {
    fn visit_item(&mut self, item: &syn::Item) {
        match item {
            syn::Item::Fn(item) => self.function(&item.attrs, &item.sig, &item.block),
            syn::Item::Mod(module) if is_live(&module.attrs) => visit::visit_item_mod(self, module),
            syn::Item::Impl(item) if is_live(&item.attrs) => {
                let owner = std::mem::replace(&mut self.owner, type_name(&item.self_ty));
                visit::visit_item_impl(self, item);
                self.owner = owner;
            }
            syn::Item::Trait(item) if is_live(&item.attrs) => {
                let owner = std::mem::replace(&mut self.owner, item.ident.to_string());
                visit::visit_item_trait(self, item);
                self.owner = owner;
            }
            _ => {}
        }
    }

    fn visit_impl_item(&mut self, item: &syn::ImplItem) {
        if let syn::ImplItem::Fn(function) = item {
            self.function(&function.attrs, &function.sig, &function.block);
        }
    }

    fn visit_trait_item(&mut self, item: &syn::TraitItem) {
        if let syn::TraitItem::Fn(function) = item
            && let Some(block) = &function.default
        {
            self.function(&function.attrs, &function.sig, block);
        }
    }

    fn visit_stmt(&mut self, statement: &syn::Stmt) {
        let attributes: &[syn::Attribute] = match statement {
            syn::Stmt::Local(local) => &local.attrs,
            syn::Stmt::Expr(expression, _) => attributes(expression),
            _ => &[],
        };
        if is_live(attributes) {
            self.statement(statement);
            visit::visit_stmt(self, statement);
        }
    }

    fn visit_arm(&mut self, arm: &syn::Arm) {
        if !is_live(&arm.attrs) {
            return;
        }
        if let Some((_, guard)) = &arm.guard {
            self.condition(guard, false);
            self.visit_expr(guard);
            if is_never(guard) {
                return;
            }
        }
        self.visit_expr(&arm.body);
    }

    fn visit_expr(&mut self, expression: &syn::Expr) {
        match expression {
            syn::Expr::Binary(binary) => self.operator(binary),
            // Whether something without an effect is done has none either.
            syn::Expr::If(branch)
                if branch.else_branch.is_none() && is_without_effect(&branch.then_branch) =>
            {
                return;
            }
            syn::Expr::If(branch) => {
                self.condition(&branch.cond, false);
                self.visit_expr(&branch.cond);
                if !is_never(&branch.cond) {
                    self.visit_block(&branch.then_branch);
                }
                if let Some((_, otherwise)) = &branch.else_branch
                    && !is_always(&branch.cond)
                {
                    self.visit_expr(otherwise);
                }
                return;
            }
            syn::Expr::While(repeated) => self.condition(&repeated.cond, true),
            syn::Expr::Unary(unary) if matches!(unary.op, syn::UnOp::Not(_)) && !is_query(&unary.expr) => {
                let operator = unary.op.span().byte_range();
                self.add(Kind::Branch, Form::Expression, unary.span().byte_range(), operator, "");
            }
            syn::Expr::Lit(literal) => self.number(literal),
            syn::Expr::Path(path) => {
                if let Some(last) = path.path.segments.last().map(|segment| segment.ident.to_string())
                    && is_constant(&last)
                {
                    let text = self.text(path).to_owned();
                    if last != "MAX" {
                        self.replace(Kind::Constant, path, &format!("({text} + 1)"));
                    }
                    self.replace(Kind::Constant, path, &format!("({text} - 1)"));
                }
            }
            // The length is a constant; what an array is filled with at first is overwritten, or else read in a test.
            syn::Expr::Repeat(_) | syn::Expr::Const(_) | syn::Expr::Macro(_) => return,
            syn::Expr::Cast(cast) if matches!(*cast.expr, syn::Expr::Lit(_)) => return,
            syn::Expr::Call(call) => {
                if let syn::Expr::Path(function) = &*call.func
                    && let Some(name) = function.path.segments.last()
                    && is_hint(&name.ident)
                {
                    return;
                }
                for argument in &call.args {
                    self.visit_expr(argument);
                }
                if !matches!(*call.func, syn::Expr::Path(_)) {
                    self.visit_expr(&call.func);
                }
                return;
            }
            syn::Expr::MethodCall(call) if is_hint(&call.method) => {
                return self.visit_expr(&call.receiver);
            }
            _ => {}
        }
        visit::visit_expr(self, expression);
    }

    fn visit_pat(&mut self, _: &syn::Pat) {}
    fn visit_type(&mut self, _: &syn::Type) {}
    fn visit_generics(&mut self, _: &syn::Generics) {}
    fn visit_path_arguments(&mut self, _: &syn::PathArguments) {}
    fn visit_angle_bracketed_generic_arguments(&mut self, _: &syn::AngleBracketedGenericArguments) {}
    fn visit_attribute(&mut self, _: &syn::Attribute) {}
    fn visit_macro(&mut self, _: &syn::Macro) {}
}

/// What an operator is exchanged for.
fn exchanged(operator: &syn::BinOp) -> Option<(Kind, &'static str)> {
    use syn::BinOp;
    Some(match operator {
        BinOp::Lt(_) => (Kind::Comparison, "<="),
        BinOp::Le(_) => (Kind::Comparison, "<"),
        BinOp::Gt(_) => (Kind::Comparison, ">="),
        BinOp::Ge(_) => (Kind::Comparison, ">"),
        BinOp::Eq(_) => (Kind::Comparison, "!="),
        BinOp::Ne(_) => (Kind::Comparison, "=="),
        BinOp::And(_) => (Kind::Logic, "||"),
        BinOp::Or(_) => (Kind::Logic, "&&"),
        BinOp::Add(_) => (Kind::Arithmetic, "-"),
        BinOp::Sub(_) => (Kind::Arithmetic, "+"),
        BinOp::Mul(_) | BinOp::Rem(_) => (Kind::Arithmetic, "/"),
        BinOp::Div(_) => (Kind::Arithmetic, "*"),
        BinOp::BitAnd(_) | BinOp::BitXor(_) => (Kind::Arithmetic, "|"),
        BinOp::BitOr(_) => (Kind::Arithmetic, "&"),
        BinOp::Shl(_) => (Kind::Arithmetic, ">>"),
        BinOp::Shr(_) => (Kind::Arithmetic, "<<"),
        BinOp::AddAssign(_) => (Kind::Arithmetic, "-="),
        BinOp::SubAssign(_) => (Kind::Arithmetic, "+="),
        BinOp::BitOrAssign(_) => (Kind::Arithmetic, "&="),
        BinOp::BitAndAssign(_) => (Kind::Arithmetic, "|="),
        _ => return None,
    })
}

/// The values that a function of this type may return at once; an empty one for a function without a value.
fn returned(output: &syn::ReturnType) -> Vec<&'static str> {
    let syn::ReturnType::Type(_, kind) = output else { return vec![""] };
    let syn::Type::Path(path) = &**kind else { return Vec::new() };
    let Some(last) = path.path.segments.last() else { return Vec::new() };
    let of_unit = match &last.arguments {
        syn::PathArguments::AngleBracketed(list) => matches!(
            list.args.first(),
            Some(syn::GenericArgument::Type(syn::Type::Tuple(tuple))) if tuple.elems.is_empty()
        ),
        _ => false,
    };
    match last.ident.to_string().as_str() {
        "bool" => vec!["true", "false"],
        "Option" => vec!["None"],
        "Result" if of_unit => vec!["Ok(())"],
        _ => Vec::new(),
    }
}

/// Whether what has these attributes is compiled, outside tests.
fn is_live(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().all(|attribute| {
        let is_cfg = attribute.path().is_ident("cfg");
        !is_for_tests(attribute) && (!is_cfg || is_for_hosts(attribute))
    })
}

fn is_for_hosts(attribute: &syn::Attribute) -> bool {
    let syn::Meta::List(list) = &attribute.meta else { return false };
    list.tokens.to_string().replace(' ', "") == "not(target_os=\"none\")"
}

fn attributes(expression: &syn::Expr) -> &[syn::Attribute] {
    match expression {
        syn::Expr::Block(node) => &node.attrs,
        syn::Expr::If(node) => &node.attrs,
        syn::Expr::Call(node) => &node.attrs,
        syn::Expr::MethodCall(node) => &node.attrs,
        syn::Expr::Unsafe(node) => &node.attrs,
        _ => &[],
    }
}

/// Whether a call of this function costs time or memory only.
fn is_hint(name: &syn::Ident) -> bool {
    let name = name.to_string();
    HINTS.contains(&name.as_str()) || WITHOUT_EFFECT.contains(&name.as_str())
}

/// Whether a block does nothing but calls without an effect, and what leads to their arguments.
fn is_without_effect(block: &syn::Block) -> bool {
    let is_call = |statement: &syn::Stmt| match statement {
        syn::Stmt::Expr(expression @ (syn::Expr::Call(_) | syn::Expr::MethodCall(_)), _) => {
            !is_removable(expression)
        }
        _ => false,
    };
    block.stmts.iter().any(is_call)
        && block.stmts.iter().all(|statement| matches!(statement, syn::Stmt::Local(_)) || is_call(statement))
}

fn is_removable(expression: &syn::Expr) -> bool {
    match expression {
        syn::Expr::Try(tried) => is_removable(&tried.expr),
        syn::Expr::MethodCall(call) => !WITHOUT_EFFECT.contains(&call.method.to_string().as_str()),
        syn::Expr::Call(call) => match &*call.func {
            syn::Expr::Path(function) => function
                .path
                .segments
                .last()
                .is_none_or(|last| !WITHOUT_EFFECT.contains(&last.ident.to_string().as_str())),
            _ => true,
        },
        // An assignment to a variable may be its first.
        syn::Expr::Assign(assignment) => !matches!(*assignment.left, syn::Expr::Path(_)),
        _ => false,
    }
}

/// Whether it asks a mutation point, which is a constant in the product.
fn is_always(condition: &syn::Expr) -> bool {
    matches!(condition, syn::Expr::MethodCall(call) if call.method == "is_active")
}

/// Whether it is false in the product.
fn is_never(condition: &syn::Expr) -> bool {
    match condition {
        syn::Expr::Unary(unary) => matches!(unary.op, syn::UnOp::Not(_)) && is_always(&unary.expr),
        syn::Expr::Binary(binary) if matches!(binary.op, syn::BinOp::And(_)) => {
            is_never(&binary.left) || is_never(&binary.right)
        }
        _ => false,
    }
}

fn is_query(condition: &syn::Expr) -> bool {
    is_always(condition) || is_never(condition)
}

fn is_constant(name: &str) -> bool {
    name.len() > 1
        && name.chars().all(|letter| letter.is_ascii_uppercase() || letter.is_ascii_digit() || letter == '_')
}

fn type_name(kind: &syn::Type) -> String {
    match kind {
        syn::Type::Path(path) => {
            path.path.segments.last().map(|segment| segment.ident.to_string()).unwrap_or_default()
        }
        _ => String::new(),
    }
}

/// The text with single spaces.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
