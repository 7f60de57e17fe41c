//! Bounds on the values of a manifest, checked without allocation before anything is parsed.

/// The most values that a manifest may have: numbers, strings, lists and maps, including nested ones.
pub(super) const MOST_VALUES: usize = 1 << 20;

/// The deepest nesting of lists and maps.
pub(super) const DEEPEST: usize = 64;

/// Checks the number of values in a JSON text, and how deep they are nested. A value of two bytes can take hundreds of
/// bytes in memory, so the length of the text alone is a weak bound.
///
/// # Errors
///
/// A description of the bound that is exceeded.
pub(super) fn check_bounds(bytes: &[u8]) -> Result<(), String> {
    let (mut values, mut depth) = (1, 0_usize);
    let mut bytes = bytes.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => skip_text(&mut bytes),
            // At most one value follows.
            b',' => values += 1,
            b'[' | b'{' => {
                values += 1;
                depth += 1;
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > DEEPEST {
            return Err(format!(
                "values are in one another more than {} deep, which is the most that is allowed",
                DEEPEST
            ));
        }
        if values > MOST_VALUES {
            return Err(format!(
                "the manifest has more than the {} values that are allowed",
                MOST_VALUES
            ));
        }
    }
    Ok(())
}

/// Skips the rest of a string, including its closing quote.
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
        let many = "[,{\\\"".repeat(MOST_VALUES);
        assert_eq!(
            check_bounds(format!("{{\"{many}\": \"{many}\"}}").as_bytes()),
            Ok(())
        );
    }
}
