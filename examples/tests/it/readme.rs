//! Tests that documents show the difference between two programs as it is.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

use std::path::Path;

fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// Returns how many lines the first diff of a document changes. Each line must be in the program that it belongs to;
/// without `before`, removed lines are not checked.
fn changed_lines(document: &str, before: Option<&str>, after: &str) -> usize {
    let document = read(document);
    let (before, after) = (before.map(read), read(after));
    let start = document.find("```diff\n").unwrap() + "```diff\n".len();
    let shown = &document[start..start + document[start..].find("```").unwrap()];
    let mut changed = 0;
    for line in shown.lines() {
        let (sources, text) = match line.split_at_checked(1) {
            Some(("-", text)) => (vec![before.as_ref()], text),
            Some(("+", text)) => (vec![Some(&after)], text),
            Some((" ", text)) => (vec![before.as_ref(), Some(&after)], text),
            _ => continue,
        };
        changed += usize::from(sources.len() == 1);
        for source in sources.into_iter().flatten() {
            assert!(
                source.lines().any(|line| line == text),
                "not in the example: {line}"
            );
        }
    }
    changed
}

#[test]
fn the_difference_in_the_readme_is_that_of_the_examples() {
    let changed = changed_lines("../README.md", Some("mnist_plain.rs"), "mnist.rs");
    assert!(changed > 20, "{changed} lines");
}

#[test]
fn the_difference_to_a_program_of_burn_train_is_that_of_the_example() {
    let changed = changed_lines("../docs/from-burn-train.md", None, "learner.rs");
    assert_eq!(changed, 20, "nine lines become eleven, says the document");
}
