//! Compares `docs/format.md` with the code: every structure, field, offset and size.

use std::collections::BTreeMap;

/// Offset, size and name of each field.
type Fields = Vec<(usize, usize, String)>;

/// Structures as the page describes them: size and fields by name.
fn page() -> BTreeMap<String, (usize, Fields)> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/format.md");
    let text = std::fs::read_to_string(path).expect("docs/format.md can be read");
    let mut found = BTreeMap::new();
    let mut current: Option<String> = None;
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("### ") {
            current = heading.split_once(" (").and_then(|(name, rest)| {
                let size = rest.strip_suffix(" bytes)")?.parse().ok()?;
                found.insert(name.to_owned(), (size, Vec::new()));
                Some(name.to_owned())
            });
        } else if line.starts_with('#') {
            current = None;
        }
        let Some(fields) = current.as_ref().and_then(|name| found.get_mut(name)) else { continue };
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        if let [_, offset, size, name, ..] = cells[..]
            && let (Ok(offset), Ok(size)) = (offset.parse(), size.parse())
        {
            fields.1.push((offset, size, name.trim_matches('`').to_owned()));
        }
    }
    found
}

#[test]
fn the_page_names_every_structure_and_field_with_its_place() {
    let page = page();
    let code: BTreeMap<String, (usize, Fields)> = cbd_format::structures()
        .into_iter()
        .map(|layout| {
            let fields =
                layout.fields.into_iter().map(|field| (field.offset, field.size, field.name.to_owned()));
            (layout.name.to_owned(), (layout.size, fields.collect()))
        })
        .collect();
    assert_eq!(page.keys().collect::<Vec<_>>(), code.keys().collect::<Vec<_>>());
    for (name, (size, fields)) in &code {
        assert_eq!(&page[name].0, size, "size of {name}");
        assert_eq!(&page[name].1, fields, "fields of {name}");
    }
}

#[test]
fn fields_cover_every_byte_of_their_structure() {
    for layout in cbd_format::structures() {
        let mut end = 0;
        for field in &layout.fields {
            assert_eq!(field.offset, end, "{} of {}", field.name, layout.name);
            end += field.size;
        }
        assert_eq!(end, layout.size, "{}", layout.name);
    }
}
