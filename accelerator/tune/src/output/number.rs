//! Numbers as C's `%g` and Python print them.

use serde_json::Value;

/// With six significant digits: C's `%g`.
pub(super) fn general(value: f64) -> String {
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
pub(super) fn python(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'")),
        Value::Array(values) => {
            let values: Vec<_> = values.iter().map(python).collect();
            format!("[{}]", values.join(", "))
        }
        Value::Object(map) => {
            let entries = map.iter();
            let entries = entries.map(|(name, value)| format!("'{name}': {}", python(value)));
            format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
        }
    }
}

fn trimmed(text: &str) -> &str {
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.'),
        false => text,
    }
}

#[cfg(test)]
mod tests {
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
            assert_eq!(general(value), expected);
        }
    }
}
