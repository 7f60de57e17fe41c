//! Names of folders.

/// The name of a folder for a run: characters that a path or a shell takes otherwise are written as `%` and two
/// hexadecimal digits.
pub(crate) fn folder_name(name: &str) -> String {
    let mut folder = String::new();
    for (at, character) in name.char_indices() {
        let is_hidden = at == 0 && matches!(character, '.' | '-');
        let is_special = matches!(
            character,
            '/' | '\\' | ':' | '*' | '?' | '"' | '<' | '>' | '|' | '%' | '\0'..='\u{1f}' | '\u{7f}'
        );
        if !is_hidden && !is_special {
            folder.push(character);
        } else {
            folder.push_str(&format!("%{:02X}", u32::from(character)));
        }
        // A file's name has at most 255 bytes, and a number may follow.
        if folder.len() > 200 {
            break;
        }
    }
    folder
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn separators_and_hidden_names_are_encoded_and_unicode_stays() {
        for (name, folder) in [
            ("mnist", "mnist"),
            ("a/b", "a%2Fb"),
            ("../x", "%2E.%2Fx"),
            ("..", "%2E."),
            ("50%", "50%25"),
            ("模型 é", "模型 é"),
            ("a\nb", "a%0Ab"),
        ] {
            assert_eq!(folder_name(name), folder);
        }
        assert!(folder_name(&"é".repeat(300)).len() < 210);
    }
}
