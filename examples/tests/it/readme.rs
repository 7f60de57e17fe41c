//! Tests that documents show the programs as they are, and that their links lead somewhere.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

use std::path::{Path, PathBuf};

use crate::listing;

fn path_of(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path_of(path)).unwrap()
}

/// Returns the first block of code in a language.
fn first_block<'a>(document: &'a str, language: &str) -> &'a str {
    let (_, block) = document.split_once(&format!("```{language}\n")).unwrap();
    block.split_once("```").unwrap().0
}

/// Returns the text of a document between its blocks of code.
fn prose(document: &str) -> impl Iterator<Item = &str> {
    document.split("```").step_by(2)
}

/// Returns the targets of the links in a document.
fn links(document: &str) -> impl Iterator<Item = &str> {
    let behind_texts = prose(document).flat_map(|text| text.split("](").skip(1));
    behind_texts.filter_map(|rest| Some(rest.split_once(')')?.0))
}

/// Returns `true` if a document has a heading with this anchor.
fn has_anchor(document: &Path, anchor: &str) -> bool {
    let text = std::fs::read_to_string(document).unwrap_or_default();
    prose(&text)
        .flat_map(str::lines)
        .filter(|line| line.starts_with('#'))
        .any(|heading| anchor_of(heading) == anchor)
}

/// Returns the anchor that GitHub gives to a heading.
fn anchor_of(heading: &str) -> String {
    let heading = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = heading.chars();
    let kept = kept.filter(|&c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Returns how many lines the first diff of a document changes. Each line must be in the program that it belongs to;
/// without `before`, removed lines are not checked.
fn changed_lines(document: &str, before: Option<&str>, after: &str) -> usize {
    let document = read(document);
    let (before, after) = (before.map(read), read(after));
    let shown = first_block(&document, "diff");
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
fn the_readme_can_be_read_at_once() {
    let lines = read("../README.md").lines().count();
    assert!(lines <= 130, "{lines} lines; details belong in docs");
}

#[test]
fn the_program_in_the_readme_is_that_of_the_example() {
    let (readme, example) = (read("../README.md"), read("quickstart.rs"));
    let shown = first_block(&readme, "rust");
    assert!(shown.lines().count() > 30, "{shown}");
    let mut rest = example.lines();
    for line in shown.lines() {
        assert!(
            rest.any(|found| found == line),
            "not in the example, or in another place: {line}"
        );
    }
}

#[test]
fn the_url_in_the_readme_is_that_of_the_packages() {
    let manifest = read("../Cargo.toml");
    let line = manifest
        .lines()
        .find_map(|line| line.strip_prefix("repository = "));
    let dependency = format!("# burn-accelerate = {{ git = {} }}", line.unwrap());
    assert!(
        read("../README.md").lines().any(|line| line == dependency),
        "{dependency}"
    );
}

#[test]
fn links_of_documents_lead_somewhere() {
    let documents = listing::documents(&path_of(".."));
    let others = ["../CONTRIBUTING.md", "README.md"].map(path_of);
    let mut checked = 0;
    let mut broken = Vec::new();
    for document in documents.into_iter().chain(others) {
        let text = std::fs::read_to_string(&document).unwrap();
        for link in links(&text).filter(|link| !link.contains("://")) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => document.clone(),
                file => document.parent().unwrap().join(file),
            };
            if !target.exists() || !(anchor.is_empty() || has_anchor(&target, anchor)) {
                broken.push(format!("{}: {link}", document.display()));
            }
            checked += 1;
        }
    }
    assert!(checked > 100, "only {checked} links were found");
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn anchors_are_those_of_github() {
    let anchor = anchor_of("## The `Learner` on several processes, and A/B");
    assert_eq!(anchor, "the-learner-on-several-processes-and-ab");
}

#[test]
fn the_difference_to_a_plain_loop_is_that_of_the_examples() {
    let document = "../docs/from-burn.md";
    let changed = changed_lines(document, Some("mnist_plain.rs"), "mnist.rs");
    assert!(changed > 20, "{changed} lines");
}

#[test]
fn the_difference_to_a_program_of_burn_train_is_that_of_the_example() {
    let changed = changed_lines("../docs/from-burn-train.md", None, "learner.rs");
    assert_eq!(changed, 20, "nine lines become eleven, says the document");
}
