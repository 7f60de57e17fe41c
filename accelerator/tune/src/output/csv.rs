//! Fields of comma-separated values (RFC 4180).

use accelerator_host::text::csv_cell;
use serde_json::Value;

/// A line of them.
pub(super) fn line<'a>(fields: impl IntoIterator<Item = &'a Value>) -> String {
    let fields = fields.into_iter().map(|field| match field {
        Value::Null => String::new(),
        Value::String(text) => csv_cell(text),
        Value::Array(_) | Value::Object(_) => csv_cell(&field.to_string()),
        other => other.to_string(),
    });
    let mut line = fields.collect::<Vec<_>>().join(",");
    line.push('\n');
    line
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
