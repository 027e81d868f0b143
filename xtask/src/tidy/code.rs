//! Rules about Rust: lengths, module headers, fields, sleeps, system calls; and the figures of the product.

use super::tree::File;
use super::{Measure, Rule};
use proc_macro2::{Delimiter, Span, TokenStream, TokenTree};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::str::FromStr;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// Length of functions.
pub const FUNCTION: Rule = Rule { name: "function", about: "lines of a function", limit: 80 };
/// Length of files.
pub const FILE: Rule = Rule { name: "file", about: "lines of a file", limit: 600 };
/// Modules have a header.
pub const HEADER: Rule = Rule { name: "header", about: "modules without a header (//!)", limit: 0 };
/// State has one owner.
pub const FIELD: Rule =
    Rule { name: "field", about: "fields of the engine that other modules reach, in a file", limit: 0 };
/// Waits have a condition.
pub const SLEEP: Rule =
    Rule { name: "sleep", about: "calls of thread::sleep outside tests, in a file", limit: 0 };
/// System calls are wrapped in one crate.
pub const SYSTEM_CALL: Rule = Rule {
    name: "system-call",
    about: "calls of libc functions outside crates/sys and tests, in a crate",
    limit: 0,
};

/// The crate that wraps system calls.
const SYSTEM_CRATE: &str = "crates/sys/";

/// The measurements.
pub struct Code {
    /// The measurements of each subject.
    pub measures: Vec<Measure>,
    /// The figures of the whole product.
    pub figures: BTreeMap<&'static str, usize>,
}

/// Measures all Rust files.
///
/// # Errors
/// A file that does not parse.
pub fn measure(files: &[File]) -> Result<Code, String> {
    let mut code = Code { measures: Vec::new(), figures: BTreeMap::new() };
    for name in ["product_lines", "test_lines", "unsafe_blocks"] {
        code.figures.insert(name, 0);
    }
    let mut calls: BTreeMap<String, Measure> = BTreeMap::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        let parsed = Parsed::new(file)?;
        parsed.lengths(&mut code.measures);
        parsed.count(&mut code.figures);
        if file.path.contains("/src/") && !file.is_test() && !file.text.starts_with("//!") {
            let mut header = Measure::none(&HEADER, &file.path);
            header.add(|| file.path.clone());
            code.measures.push(header);
        }
        if file.path.starts_with("crates/engine/src/") {
            code.measures.push(parsed.reachable_fields());
        }
        if file.is_product() {
            code.measures.push(parsed.sleeps());
            if !file.path.starts_with(SYSTEM_CRATE) {
                let owner = file.path.split('/').take(2).collect::<Vec<_>>().join("/");
                let crate_calls =
                    calls.entry(owner.clone()).or_insert_with(|| Measure::none(&SYSTEM_CALL, owner));
                parsed.system_calls(crate_calls);
            }
        }
    }
    code.measures.extend(calls.into_values());
    Ok(code)
}

/// A file, its tokens, and which of its lines are tests.
struct Parsed<'a> {
    file: &'a File,
    items: syn::File,
    tests: Vec<RangeInclusive<usize>>,
    /// All tokens outside tests, with groups opened.
    tokens: Vec<Token>,
}

/// A token, its text and line; `{` alone stands for a group in braces, `(` for one in parentheses.
struct Token {
    text: String,
    line: usize,
}

impl<'a> Parsed<'a> {
    fn new(file: &'a File) -> Result<Self, String> {
        let items = syn::parse_file(&file.text).map_err(|error| format!("{}: {error}", file.path))?;
        let mut tests = Tests::default();
        tests.visit_file(&items);
        let mut parsed = Self { file, items, tests: tests.ranges, tokens: Vec::new() };
        let stream = TokenStream::from_str(&file.text).map_err(|error| format!("{}: {error}", file.path))?;
        let mut tokens = Vec::new();
        flatten(stream, &mut tokens);
        tokens.retain(|token| !parsed.is_test(token.line));
        parsed.tokens = tokens;
        Ok(parsed)
    }

    fn is_test(&self, line: usize) -> bool {
        self.file.is_test() || self.tests.iter().any(|range| range.contains(&line))
    }

    fn lengths(&self, measures: &mut Vec<Measure>) {
        let path = &self.file.path;
        let whole = Measure {
            value: self.file.text.lines().count(),
            at: vec![path.clone()],
            ..Measure::none(&FILE, path)
        };
        measures.push(whole);
        let mut functions = Functions::default();
        functions.visit_file(&self.items);
        for (name, lines) in functions.found {
            let at = vec![format!("{path}:{}", lines.start())];
            let subject = format!("{path}::{name}");
            measures.push(Measure {
                value: lines.end() - lines.start() + 1,
                at,
                ..Measure::none(&FUNCTION, subject)
            });
        }
    }

    fn count(&self, figures: &mut BTreeMap<&'static str, usize>) {
        let lines = self.file.text.lines().count();
        let tests = (1..=lines).filter(|line| self.is_test(*line)).count();
        let mut add = |name, value| *figures.entry(name).or_default() += value;
        if !self.file.is_product() {
            if self.file.path.starts_with("crates/") {
                add("test_lines", lines);
            }
            return;
        }
        add("product_lines", lines - tests);
        add("test_lines", tests);
        let blocks =
            self.tokens.windows(2).filter(|pair| pair[0].text == "unsafe" && pair[1].text == "{").count();
        add("unsafe_blocks", blocks);
    }

    fn sleeps(&self) -> Measure {
        let mut measure = Measure::none(&SLEEP, &self.file.path);
        for window in self.tokens.windows(4) {
            if is(window, &["thread", ":", ":", "sleep"]) {
                measure.add(|| format!("{}:{}", self.file.path, window[0].line));
            }
        }
        measure
    }

    fn system_calls(&self, measure: &mut Measure) {
        for window in self.tokens.windows(5) {
            let is_call = is(window, &["libc", ":", ":"]) && window[4].text == "(";
            if is_call {
                measure.add(|| format!("{}:{} {}", self.file.path, window[0].line, window[3].text));
            }
        }
    }

    fn reachable_fields(&self) -> Measure {
        let mut fields = Fields::default();
        fields.visit_file(&self.items);
        let mut measure = Measure::none(&FIELD, &self.file.path);
        for (line, name) in fields.found.into_iter().filter(|(line, _)| !self.is_test(*line)) {
            measure.add(|| format!("{}:{line} {name}", self.file.path));
        }
        measure
    }
}

fn is(tokens: &[Token], texts: &[&str]) -> bool {
    tokens.iter().zip(texts).all(|(token, text)| token.text == *text)
}

fn flatten(stream: TokenStream, into: &mut Vec<Token>) {
    for tree in stream {
        let line = tree.span().start().line;
        match tree {
            TokenTree::Group(group) => {
                let text = match group.delimiter() {
                    Delimiter::Brace => "{",
                    Delimiter::Parenthesis => "(",
                    Delimiter::Bracket => "[",
                    Delimiter::None => "",
                };
                into.push(Token { text: text.to_owned(), line });
                flatten(group.stream(), into);
            }
            other => into.push(Token { text: other.to_string(), line }),
        }
    }
}

fn lines(span: Span) -> RangeInclusive<usize> {
    span.start().line..=span.end().line
}

/// Finds the code that is compiled only for tests.
#[derive(Default)]
struct Tests {
    ranges: Vec<RangeInclusive<usize>>,
}

impl Visit<'_> for Tests {
    fn visit_item(&mut self, item: &syn::Item) {
        let attributes = match item {
            syn::Item::Fn(item) => &item.attrs,
            syn::Item::Mod(item) => &item.attrs,
            syn::Item::Impl(item) => &item.attrs,
            syn::Item::Struct(item) => &item.attrs,
            syn::Item::Use(item) => &item.attrs,
            syn::Item::Const(item) => &item.attrs,
            syn::Item::Macro(item) => &item.attrs,
            _ => return visit::visit_item(self, item),
        };
        if attributes.iter().any(is_for_tests) {
            self.ranges.push(lines(item.span()));
        } else {
            visit::visit_item(self, item);
        }
    }
}

/// `#[test]`, and `#[cfg(test)]` in any combination with `all`.
pub fn is_for_tests(attribute: &syn::Attribute) -> bool {
    if attribute.path().is_ident("test") {
        return true;
    }
    let syn::Meta::List(list) = &attribute.meta else { return false };
    let words: Vec<_> = list.tokens.clone().into_iter().map(|tree| tree.to_string()).collect();
    list.path.is_ident("cfg")
        && (words == ["test"]
            || words.first().is_some_and(|word| word == "all")
                && list.tokens.to_string().split(['(', ')', ',', ' ']).any(|word| word == "test"))
}

/// Finds functions and their lines.
#[derive(Default)]
struct Functions {
    found: Vec<(String, RangeInclusive<usize>)>,
}

impl Functions {
    fn add(&mut self, signature: &syn::Signature, block: &syn::Block) {
        let lines = signature.span().start().line..=block.span().end().line;
        self.found.push((signature.ident.to_string(), lines));
    }
}

impl Visit<'_> for Functions {
    fn visit_item_fn(&mut self, function: &syn::ItemFn) {
        self.add(&function.sig, &function.block);
        visit::visit_item_fn(self, function);
    }

    fn visit_impl_item_fn(&mut self, function: &syn::ImplItemFn) {
        self.add(&function.sig, &function.block);
        visit::visit_impl_item_fn(self, function);
    }

    fn visit_trait_item_fn(&mut self, function: &syn::TraitItemFn) {
        if let Some(block) = &function.default {
            self.add(&function.sig, block);
        }
        visit::visit_trait_item_fn(self, function);
    }
}

/// Finds fields that are `pub(crate)` or `pub(super)`.
#[derive(Default)]
struct Fields {
    found: Vec<(usize, String)>,
}

impl Visit<'_> for Fields {
    fn visit_field(&mut self, field: &syn::Field) {
        if matches!(field.vis, syn::Visibility::Restricted(_)) {
            let name =
                field.ident.as_ref().map_or_else(|| "a field without a name".to_owned(), ToString::to_string);
            self.found.push((field.span().start().line, name));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(path: &str, text: &str) -> Code {
        measure(&[File { path: path.to_owned(), text: text.to_owned() }]).expect("it parses")
    }

    fn value(code: &Code, rule: &Rule) -> usize {
        code.measures
            .iter()
            .filter(|measure| measure.rule == rule)
            .map(|measure| measure.value)
            .max()
            .unwrap_or(0)
    }

    #[test]
    fn tests_are_not_product() {
        let text =
            "//! A.\nfn a() {\n}\n#[cfg(test)]\nmod tests {\n    fn b() { std::thread::sleep(x); }\n}\n";
        let code = measured("crates/a/src/lib.rs", text);
        assert_eq!(code.figures["product_lines"], 3);
        assert_eq!(code.figures["test_lines"], 4);
        assert_eq!(value(&code, &SLEEP), 0);
        assert_eq!(value(&code, &HEADER), 0);
    }

    #[test]
    fn what_the_rules_forbid_is_found() {
        let text = "fn a() {\n    thread::sleep(x);\n    unsafe { libc::close(1) };\n    call!(unsafe { libc::x });\n}\n";
        let code = measured("crates/a/src/lib.rs", text);
        assert_eq!(value(&code, &SLEEP), 1);
        assert_eq!(value(&code, &SYSTEM_CALL), 1);
        assert_eq!(value(&code, &HEADER), 1);
        assert_eq!(value(&code, &FUNCTION), 5);
        assert_eq!(code.figures["unsafe_blocks"], 2);
    }

    #[test]
    fn fields_of_the_engine_have_one_owner() {
        let text = "//! A.\npub struct A { pub(crate) a: u8, b: u8, pub(super) c: u8, pub d: u8 }\n";
        assert_eq!(value(&measured("crates/engine/src/a.rs", text), &FIELD), 2);
        assert_eq!(value(&measured("crates/other/src/a.rs", text), &FIELD), 0);
    }
}
