//! Command lines as they are compared.

use std::collections::BTreeMap;

use super::facts::Provenance;

/// Arguments by the option that they are, a repeated one with its number; the others by their place among themselves. An
/// option without a value has itself for one.
pub(super) fn by_option<'a>(words: impl Iterator<Item = &'a String>) -> BTreeMap<String, &'a str> {
    let is_option = |word: &str| {
        let rest = word.strip_prefix('-');
        rest.is_some_and(|rest| rest.starts_with(|c: char| c == '-' || c.is_alphabetic()))
    };
    let mut found = BTreeMap::new();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut words = words.map(String::as_str).peekable();
    while let Some(word) = words.next() {
        let (name, value) = match word.split_once('=') {
            _ if !is_option(word) => ("", word),
            Some(pair) => pair,
            None if word == "--" => (word, word),
            None => (word, words.next_if(|next| !is_option(next)).unwrap_or(word)),
        };
        let count = counts.entry(name).or_default();
        *count += 1;
        let key = match (name, *count) {
            ("", place) => place.to_string(),
            (name, 1) => name.to_owned(),
            (name, place) => format!("{name} ({place})"),
        };
        found.insert(key, value);
    }
    found
}

/// What `accel-launch` was called with, without the program and its arguments, where it ends with those.
pub(super) fn launcher_words(side: &Provenance) -> impl Iterator<Item = &String> {
    let (program, arguments) = side.arguments.split_at(side.arguments.len().min(1));
    let words = side.launched_by.as_slice();
    let options = match words.strip_suffix(arguments) {
        Some(options) => options.strip_suffix(program).unwrap_or(options),
        None => words,
    };
    options.iter().skip(1)
}
