//! The page: its markup, style and scripts around the data.

use std::fmt::Write;

use accelerator_manifest::ContentHash;

use super::model::{Extreme, PageRun};

/// What a page shows.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Page<'a> {
    /// Runs as they are, with all that is needed to show them.
    Report {
        title: &'a str,
        /// JSON.
        data: &'a str,
        runs: &'a [PageRun],
    },
    /// Runs of a server, asked for as they change.
    #[cfg(feature = "board")]
    Board { title: &'a str, token: &'a str },
}

/// The page as HTML.
///
/// A script or a style runs if it has the page's nonce. In a report that is the hash of the data, which nothing within the
/// data can know; on a board that of the token and the title.
pub(crate) fn page(page: &Page<'_>) -> String {
    let (title, data, summary, secret, connect) = match *page {
        Page::Report { title, data, runs } => (
            title,
            script_json(data),
            summary(runs),
            data.to_owned(),
            "'none'",
        ),
        #[cfg(feature = "board")]
        Page::Board { title, token } => (
            title,
            "null".to_owned(),
            String::new(),
            format!("{token}/{title}"),
            "'self'",
        ),
    };
    let images = if connect == "'self'" {
        "'self' data:"
    } else {
        "data:"
    };
    let nonce = ContentHash::of(secret.as_bytes()).to_string();
    let title = escape(title);
    format!(
        r##"<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src {images}; connect-src {connect}; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{title}</title>
<style nonce="{nonce}">{STYLE}</style>
</head>
<body>
<svg id="svg" width="0" height="0" aria-hidden="true"></svg>
<div id="app"></div>
<noscript><main><h1>{title}</h1><p>Charts need JavaScript. These are the values.</p>{summary}</main></noscript>
<script type="application/json" id="data" nonce="{nonce}">{data}</script>
<script nonce="{nonce}">{SCRIPT}</script>
</body>
</html>
"##
    )
}

/// Text as HTML, also within an attribute's quotes.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            _ => escaped.push(character),
        }
    }
    escaped
}

/// JSON that no markup within its strings can end.
fn script_json(json: &str) -> String {
    json.replace('<', "\\u003c")
}

/// The last, least and greatest values of all series as a table, for who runs no scripts.
fn summary(runs: &[PageRun]) -> String {
    let mut html = String::new();
    let shown = |extreme: &Option<Extreme>| match extreme {
        Some(Extreme { v, s }) => format!("{} (step {s})", v.0),
        None => "–".to_owned(),
    };
    for run in runs {
        let (label, status) = (escape(&run.label), &run.status);
        // Writing to a string does not fail.
        let _ = write!(
            html,
            "<h2>{label}: {status}</h2><table><tr><th>metric<th>last<th>min<th>max</tr>"
        );
        for series in &run.series {
            let _ = write!(
                html,
                "<tr><td>{}<td>{}<td>{}<td>{}</tr>",
                escape(&series.key),
                shown(&series.last),
                shown(&series.min),
                shown(&series.max)
            );
        }
        html.push_str("</table>");
    }
    html
}

const STYLE: &str = include_str!("page/style.css");
const SCRIPT: &str = concat!(
    "\"use strict\";\n(() => {\n",
    include_str!("page/dom.js"),
    include_str!("page/chart.js"),
    include_str!("page/media.js"),
    include_str!("page/lineage.js"),
    include_str!("page/sections.js"),
    include_str!("page/app.js"),
    "})();\n"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_become_markup() {
        assert_eq!(
            escape(r#"<script>alert("x")</script> & 'é' 😀"#),
            "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt; &amp; &#39;é&#39; 😀"
        );
        let json = script_json(r#"{"a":"</script><!--<script>"}"#);
        assert!(!json.contains('<'));
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["a"], "</script><!--<script>");
    }

    #[test]
    fn the_program_can_stand_in_a_page() {
        for text in [SCRIPT, STYLE] {
            assert!(!text.contains("</s") && !text.contains("<!--"));
            assert!(
                !text.contains("http:") && !text.contains("https:"),
                "no address"
            );
            for word in ["innerHTML", "document.write", "eval(", "@import"] {
                assert!(!text.contains(word), "{word}");
            }
        }
        assert!(!STYLE.contains("url("));
    }
}
