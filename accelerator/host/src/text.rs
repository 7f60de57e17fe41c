//! Text for people, shells and spreadsheets: tables, numbers, quoted words and cells.

use std::ffi::OsStr;

/// Aligns `rows` in columns, two spaces apart, without trailing spaces.
pub fn columns(rows: &[impl AsRef<[String]>]) -> String {
    let mut widths = Vec::new();
    for row in rows {
        for (at, cell) in row.as_ref().iter().enumerate() {
            let width = cell.chars().count();
            match widths.get_mut(at) {
                Some(widest) => *widest = width.max(*widest),
                None => widths.push(width),
            }
        }
    }
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> = row
            .as_ref()
            .iter()
            .zip(&widths)
            .map(|(cell, &width)| format!("{cell:width$}"))
            .collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Formats a measured number with six significant digits: `0.0123457`, `1.5e-9`, `NaN`. Whole numbers below 10¹⁵ keep
/// all digits.
pub fn figure(value: f64) -> String {
    if !value.is_finite() {
        return value.to_string();
    }
    let scientific = format!("{value:.5e}");
    let Some((digits, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let trimmed = |text: &str| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text.to_owned(),
    };
    match exponent {
        -5..=5 => trimmed(&format!("{value:.*}", (5 - exponent) as usize)),
        6..15 if value.fract() == 0.0 => format!("{value}"),
        _ => format!("{}e{exponent}", trimmed(digits)),
    }
}

/// Escapes control characters, which would move a terminal's cursor or end a line of a table.
pub fn plain(text: &str) -> String {
    let escaped = |c: char| match c.is_control() {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    text.chars().map(escaped).collect()
}

/// Returns `text`; if it is longer than `bytes`, an ellipsis replaces the middle.
pub fn without_middle(text: &str, bytes: usize) -> String {
    if text.len() <= bytes {
        return text.to_owned();
    }
    let head = text.floor_char_boundary(bytes / 2);
    let tail = text.ceil_char_boundary(text.len() - bytes / 2);
    format!("{}…{}", &text[..head], &text[tail..])
}

/// Quotes `words` for a shell.
pub fn shell_line(words: impl IntoIterator<Item = impl AsRef<OsStr>>) -> String {
    let quoted: Vec<_> = words.into_iter().map(shell_word).collect();
    quoted.join(" ")
}

/// Quotes `word` for a shell if it needs quotes.
pub fn shell_word(word: impl AsRef<OsStr>) -> String {
    let word = word.as_ref().to_string_lossy();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%^".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.into_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// Quotes a cell of comma-separated values (RFC 4180) if it needs quotes.
pub fn csv_cell(text: &str) -> String {
    match text.contains(['"', ',', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    }
}

/// Returns the known name that a misspelt one most likely means: the nearest, if it is at least half the same.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let (likeness, known) = most_alike(name, known)?;
    (likeness >= 0.5).then_some(known)
}

/// Returns the known name that is most like a name, with their likeness from 0 to 1.
pub fn most_alike<'a>(
    name: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<(f64, &'a str)> {
    let likeness = |known| (strsim::normalized_damerau_levenshtein(name, known), known);
    let known = known.into_iter().map(likeness);
    known.max_by(|one, other| one.0.total_cmp(&other.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let rows = [["a", "b"], ["long", "c"]].map(|row| row.map(str::to_owned));
        assert_eq!(columns(&rows), "a     b\nlong  c\n");
    }

    #[test]
    fn figures_have_six_digits() {
        for (value, text) in [
            (0.0, "0"),
            (0.1 + 0.2, "0.3"),
            (-1.0 / 3.0, "-0.333333"),
            (0.001_234_567_8, "0.00123457"),
            (1.5e-9, "1.5e-9"),
            (60_000.0, "60000"),
            (1_234_567.0, "1234567"),
            (1_234_567.8, "1.23457e6"),
            (1e300, "1e300"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(figure(value), text);
        }
    }

    #[test]
    fn names_cannot_move_the_cursor() {
        assert_eq!(plain("a\nb\u{1b}[2J é"), "a\\nb\\u{1b}[2J é");
    }

    #[test]
    fn a_long_text_loses_its_middle() {
        assert_eq!(without_middle("abcdef", 6), "abcdef");
        assert_eq!(without_middle("abcdefg", 6), "abc…efg");
        assert_eq!(without_middle("ééééé", 6), "é…é");
    }

    #[test]
    fn a_command_line_can_be_given_to_a_shell() {
        let words = [
            "train",
            "--lr=1e-3",
            "--nodes=2",
            "two words",
            "",
            "it's",
            "$x",
        ];
        let quoted = r"train --lr=1e-3 --nodes=2 'two words' '' 'it'\''s' '$x'";
        assert_eq!(shell_line(words), quoted);
    }

    #[test]
    fn the_nearest_name_is_half_the_same() {
        let known = ["PORT", "PRECISION", "TRANSPORT"];
        for (name, near) in [
            ("TRASNPORT", Some("TRANSPORT")),
            ("MIXED_PRECISION", Some("PRECISION")),
            ("PROT", Some("PORT")),
            ("FOO", None),
        ] {
            assert_eq!(nearest(name, known), near, "{name}");
        }
    }

    #[test]
    fn cells_with_commas_quotes_and_line_breaks_are_quoted() {
        assert_eq!(csv_cell("train/loss"), "train/loss");
        assert_eq!(csv_cell("a,\"b\""), "\"a,\"\"b\"\"\"");
        assert_eq!(csv_cell("a\nb"), "\"a\nb\"");
    }
}
