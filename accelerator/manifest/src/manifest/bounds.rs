//! How much a manifest may hold: found without memory, before anything is read into it.

use super::Manifest;

/// Checks the number of values of a text of JSON, and how deep they are in one another. A value of two bytes takes up to
/// hundreds in memory, so the length of the text bounds little.
///
/// # Errors
///
/// What is beyond the bounds.
pub(super) fn check_bounds(bytes: &[u8]) -> Result<(), String> {
    let (mut values, mut depth) = (1, 0_usize);
    let mut bytes = bytes.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => skip_text(&mut bytes),
            // One value follows, or none.
            b',' => values += 1,
            b'[' | b'{' => {
                values += 1;
                depth += 1;
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > Manifest::DEEPEST {
            return Err(format!(
                "values are in one another more than {} deep, which is the most that is allowed",
                Manifest::DEEPEST
            ));
        }
        if values > Manifest::MOST_VALUES {
            return Err(format!(
                "the manifest has more than the {} values that are allowed",
                Manifest::MOST_VALUES
            ));
        }
    }
    Ok(())
}

/// Skips the rest of a text, and its end.
fn skip_text<'a>(bytes: &mut impl Iterator<Item = &'a u8>) {
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => return,
            b'\\' => drop(bytes.next()),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_in_texts_is_no_value() {
        let many = "[,{\\\"".repeat(Manifest::MOST_VALUES);
        assert_eq!(
            check_bounds(format!("{{\"{many}\": \"{many}\"}}").as_bytes()),
            Ok(())
        );
    }
}
