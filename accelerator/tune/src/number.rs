//! Numbers as C's `%g` and Python print them.

use serde_json::Value;

/// Formats a number with six significant digits: C's `%g`.
pub(crate) fn format_g(value: f64) -> String {
    if !value.is_finite() {
        return match (value.is_nan(), value > 0.0) {
            (true, _) => "nan",
            (false, true) => "inf",
            (false, false) => "-inf",
        }
        .to_owned();
    }
    if value == 0.0 {
        return "0".to_owned();
    }
    let scientific = format!("{value:.5e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if !(-4..6).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{}e{sign}{:02}", trimmed(mantissa), exponent.abs());
    }
    let decimals = usize::try_from(5 - exponent).unwrap_or(0);
    trimmed(&format!("{value:.decimals$}")).to_owned()
}

/// A value as Python's `repr` shows it.
pub(crate) fn repr(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
            Some(value) => repr_float(value),
            None => number.to_string(),
        },
        Value::String(text) => repr_text(text),
        Value::Array(values) => {
            let values: Vec<_> = values.iter().map(repr).collect();
            format!("[{}]", values.join(", "))
        }
        Value::Object(map) => {
            let entries = map.iter();
            let entries =
                entries.map(|(name, value)| format!("{}: {}", repr_text(name), repr(value)));
            format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
        }
    }
}

/// A number as Python's `repr` shows it: the fewest digits that mean it.
pub(crate) fn repr_float(value: f64) -> String {
    if !value.is_finite() {
        return format_g(value);
    }
    let scientific = format!("{value:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    match exponent {
        -4..16 => format!("{value:?}"),
        _ => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{mantissa}e{sign}{:02}", exponent.abs())
        }
    }
}

fn repr_text(text: &str) -> String {
    let quote = match text.contains('\'') && !text.contains('"') {
        true => '"',
        false => '\'',
    };
    let mut shown = String::from(quote);
    for character in text.chars() {
        match character {
            '\n' => shown.push_str("\\n"),
            '\r' => shown.push_str("\\r"),
            '\t' => shown.push_str("\\t"),
            '\\' => shown.push_str("\\\\"),
            _ if character == quote => shown.extend(['\\', quote]),
            _ if character.is_control() => {
                shown.push_str(&format!("\\x{:02x}", u32::from(character)));
            }
            _ => shown.push(character),
        }
    }
    shown.push(quote);
    shown
}

fn trimmed(text: &str) -> &str {
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.'),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_have_six_significant_digits() {
        for (value, expected) in [
            (0.008_744_52, "0.00874452"),
            (0.000_320_107_459_37, "0.000320107"),
            (50.226_8, "50.2268"),
            (10000.0, "10000"),
            (1e-5, "1e-05"),
            (1_234_567.0, "1.23457e+06"),
            (999_999.5, "1e+06"),
            (0.1, "0.1"),
            (0.0, "0"),
            (f64::NAN, "nan"),
            (-2.5, "-2.5"),
        ] {
            assert_eq!(format_g(value), expected);
        }
    }

    #[test]
    fn floats_are_shown_as_python_shows_them() {
        for (value, expected) in [
            (0.1129, "0.1129"),
            (1.0, "1.0"),
            (-0.00001, "-1e-05"),
            (2.5e16, "2.5e+16"),
            (f64::NAN, "nan"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(repr_float(value), expected);
        }
    }

    #[test]
    fn values_are_shown_as_python_shows_them() {
        for (value, expected) in [
            (json!(0.1174), "0.1174"),
            (json!(2.0), "2.0"),
            (json!(1e-7), "1e-07"),
            (json!(0.0001), "0.0001"),
            (json!(1.5e300), "1.5e+300"),
            (json!(1e15), "1000000000000000.0"),
            (json!(-1e16), "-1e+16"),
            (json!(12), "12"),
            (json!("it's"), "\"it's\""),
            (json!("it's \"x\""), "'it\\'s \"x\"'"),
            (json!("a\\b\n\u{1b}"), "'a\\\\b\\n\\x1b'"),
            (json!({"a": [true, null]}), "{'a': [True, None]}"),
        ] {
            assert_eq!(repr(&value), expected);
        }
    }
}
