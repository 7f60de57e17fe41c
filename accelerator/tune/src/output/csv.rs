//! Fields of comma-separated values (RFC 4180).

use serde_json::Value;

/// A line of them.
pub(super) fn line<'a>(fields: impl IntoIterator<Item = &'a Value>) -> String {
    let fields = fields.into_iter().map(|field| match field {
        Value::Null => String::new(),
        Value::String(text) => quoted(text),
        Value::Array(_) | Value::Object(_) => quoted(&field.to_string()),
        other => other.to_string(),
    });
    let mut line = fields.collect::<Vec<_>>().join(",");
    line.push('\n');
    line
}

fn quoted(text: &str) -> String {
    match text.contains(['"', ',', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_are_quoted_where_they_need_it() {
        let fields = [
            json!(0.5),
            json!("a,b"),
            json!("say \"x\""),
            json!([1, 2]),
            json!(null),
        ];
        assert_eq!(line(&fields), "0.5,\"a,b\",\"say \"\"x\"\"\",\"[1,2]\",\n");
    }
}
