//! Names that MLflow takes.

use accelerator_manifest::ContentHash;

/// The name of a metric, a parameter or a tag on the server: itself where MLflow takes it, otherwise what MLflow takes of
/// it with a hash of all of it. Two names never become one.
pub(super) fn server_name(name: &str) -> String {
    match is_taken(name) && !is_hashed(name) {
        true => name.to_owned(),
        false => hashed(name),
    }
}

/// The name with a hash of it.
pub(super) fn hashed(name: &str) -> String {
    let mut shown = String::new();
    for part in name.split('/').filter(|part| !part.is_empty()) {
        if !shown.is_empty() {
            shown.push('/');
        }
        // `.` and `..` are no names.
        if part.chars().all(|character| character == '.') {
            shown.push('_');
        }
        let characters = part.chars().map(|character| match is_plain(character) {
            true => character,
            false => '_',
        });
        shown.extend(characters);
    }
    if let Some((end, _)) = shown.char_indices().nth(LONGEST_HASHED) {
        shown.truncate(end);
    }
    let hash = ContentHash::of(name.as_bytes()).to_string();
    format!("{shown}{MARK}{}", &hash[..HASH])
}

/// The path of a file on the server, which decodes a path until it stays the same and cuts what URLs have behind one.
pub(super) fn server_path(path: &str) -> String {
    const SPECIAL: [char; 4] = ['%', '#', '?', ';'];
    if !path.contains(SPECIAL) {
        return path.to_owned();
    }
    let hash = ContentHash::of(path.as_bytes()).to_string();
    let plain = path.replace(SPECIAL, "_");
    let (folder, name) = plain.split_at(plain.rfind('/').map_or(0, |at| at + 1));
    // Before the name, behind which is what says what it is.
    format!("{folder}{} {name}", &hash[..HASH])
}

/// A value of at most `limit` characters.
pub(super) fn cut(value: &str, limit: usize) -> String {
    let length = value.chars().count();
    if length <= limit {
        return value.to_owned();
    }
    let marker = format!("… (cut from {length} characters)");
    let kept = limit - marker.chars().count();
    value.chars().take(kept).chain(marker.chars()).collect()
}

/// The server compares a name with what Python's `posixpath.normpath` makes of it.
fn is_taken(name: &str) -> bool {
    name.chars().count() <= LONGEST
        && name
            .chars()
            .all(|character| is_plain(character) || character == '/')
        && name
            .split('/')
            .all(|part| !part.is_empty() && part != "." && part != "..")
}

fn is_hashed(name: &str) -> bool {
    let end = name.rsplit_once(MARK).map(|(_, end)| end);
    end.is_some_and(|end| {
        end.len() == HASH
            && end
                .bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    })
}

/// Letters for which Rust and the server's Python agree, in any version of Unicode; without the colon, which a server on
/// Windows refuses.
fn is_plain(character: char) -> bool {
    character.is_ascii_alphanumeric()
        || matches!(character, '_' | '-' | '.' | ' ')
        // Latin, Greek, Cyrillic; kana, Chinese, Korean.
        || matches!(character, 'À'..='Ö' | 'Ø'..='ö' | 'ø'..='ɏ' | 'Α'..='Ρ' | 'Σ'..='ώ' | 'Ѐ'..='ҁ' | 'Ҋ'..='ԯ')
        || matches!(character, 'ぁ'..='ゖ' | 'ァ'..='ヺ' | '一'..='\u{9fa5}' | '가'..='힣')
}

const LONGEST: usize = 250;
/// A name with a hash may follow a prefix of a tag.
const LONGEST_HASHED: usize = 160;
const MARK: &str = " -";
const HASH: usize = 16;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_stay_readable_and_apart() {
        for name in ["train/loss", "a b-c.d_e", "模型/é", ".hidden", "a/..b"] {
            assert_eq!(server_name(name), name);
        }
        let long = "x".repeat(300);
        let names = [
            "",
            "/",
            ".",
            "..",
            "a//b",
            "a/b/",
            "/a/b",
            "../x",
            "a/../b",
            "é%",
            "é$",
            "a:b",
            "x\ny",
            "e\u{301}",
            "Ⓐ",
            &long,
            &long[1..],
        ];
        let mut seen = HashSet::new();
        for name in names {
            let mapped = server_name(name);
            assert!(
                is_taken(&mapped) && is_hashed(&mapped),
                "{name:?} becomes {mapped:?}"
            );
            assert!(
                seen.insert(server_name(&mapped)),
                "the name of a name: {mapped:?}"
            );
            assert!(seen.insert(mapped));
        }
        assert!(server_name("é%").starts_with("é_ -"));
    }

    #[test]
    fn paths_that_the_server_would_decode_stay_apart() {
        assert_eq!(server_path("a b/é=1.bin"), "a b/é=1.bin");
        let paths = ["x%41.bin", "x#41.bin", "d%/x.bin", "d?/x.bin"].map(server_path);
        for path in &paths {
            assert!(
                path.ends_with(".bin") && !path.contains(['%', '#', '?']),
                "{path}"
            );
        }
        assert!(paths[2].starts_with("d_/") && paths[2] != paths[3]);
        assert_ne!(paths[0], paths[1]);
    }

    #[test]
    fn values_are_cut_by_characters() {
        assert_eq!(cut("éé", 2), "éé");
        let value = cut(&"é".repeat(7000), 6000);
        assert_eq!(value.chars().count(), 6000);
        assert!(value.ends_with("é… (cut from 7000 characters)"));
    }

    proptest! {
        #[test]
        fn every_name_becomes_one_that_is_taken(name in any::<String>()) {
            prop_assert!(is_taken(&server_name(&name)));
        }
    }
}
