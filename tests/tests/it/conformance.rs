//! The conformance table names all tests with a number, and no others.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn the_table_names_the_tests_that_there_are() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let table = fs::read_to_string(root.join("docs/conformance.md")).unwrap();
    let mut named = BTreeSet::new();
    for row in table.lines().filter(|line| line.starts_with("| C")) {
        let (number, rest) = row[2..].split_once(" |").unwrap();
        let mut file = String::new();
        for word in rest.split('`').skip(1).step_by(2) {
            if word.ends_with(".rs") {
                assert!(root.join(word).is_file(), "{number} names {word}");
                word.clone_into(&mut file);
            } else {
                let prefix = format!("{}_", number.to_lowercase());
                assert!(word.starts_with(&prefix), "{number} names {word}");
                assert!(named.insert((file.clone(), word.to_owned())), "{word}");
            }
        }
    }
    let mut there = BTreeSet::new();
    for folder in ["accelerator", "launcher", "tests"] {
        for path in sources(&root.join(folder)) {
            let file = path.strip_prefix(&root).unwrap().to_str().unwrap();
            for line in fs::read_to_string(&path).unwrap().lines() {
                if let Some(name) = test_name(line) {
                    there.insert((file.to_owned(), name.to_owned()));
                }
            }
        }
    }
    assert!(there.len() > 40, "only {} tests have a number", there.len());
    let only = |one: &BTreeSet<_>, other| one.difference(other).cloned().collect::<Vec<_>>();
    assert_eq!(only(&named, &there), [], "named, and not there");
    assert_eq!(only(&there, &named), [], "there, and not named");
}

/// Returns the name in `fn c12_…()`.
fn test_name(line: &str) -> Option<&str> {
    let name = line.trim_start().strip_prefix("fn ")?.split('(').next()?;
    let digits = name.strip_prefix('c')?.split('_').next()?;
    let is_number = !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
    (is_number && name.contains('_')).then_some(name)
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("target") {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}
