//! The page of the control interface has the paths that the daemon serves.

use std::collections::BTreeSet;

#[test]
fn every_path_is_on_the_openapi_page_and_nothing_else() {
    let source = include_str!("../src/server.rs");
    let mut served = BTreeSet::new();
    for line in source.lines().filter(|line| line.trim_start().starts_with(".route(\"")) {
        let path = line.split('"').nth(1).unwrap();
        let methods: Vec<&str> = ["get", "post", "patch", "delete"]
            .into_iter()
            .filter(|method| line.contains(&format!(" {method}(")) || line.contains(&format!(".{method}(")))
            .collect();
        assert!(!methods.is_empty(), "{line}");
        served.extend(methods.into_iter().map(|method| format!("{method} {path}")));
    }
    let mut described = BTreeSet::new();
    let mut path = "";
    for line in include_str!("../../../docs/openapi.yaml").lines() {
        if let Some(name) = line.strip_prefix("  /").and_then(|rest| rest.strip_suffix(':')) {
            path = name;
        } else if let Some(method) = line.strip_prefix("    ").and_then(|rest| rest.strip_suffix(':'))
            && ["get", "post", "patch", "delete", "put"].contains(&method)
        {
            described.insert(format!("{method} /{path}"));
        }
    }
    assert!(served.len() >= 14);
    assert_eq!(served, described);
}
