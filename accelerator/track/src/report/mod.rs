//! Reports of runs: one HTML file.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::Path;

use accelerator_host::fs::write_output;
use accelerator_manifest::ContentHash;

use crate::error::{Error, Result};
use crate::history::RunHistory;
#[cfg(feature = "board")]
pub(crate) use data::BoardState;
use data::Extreme;
pub use data::downsample;
pub(crate) use data::{PageData, PageRun};

mod data;

/// A report of a run, or a comparison of several: one HTML file that asks no network for anything.
///
/// It shows metrics as charts, hyperparameters, what the runs ran on, texts, histograms, images, plots, what the hosts
/// measured, restarts, artifacts with their lineage, failures, and links to timelines. A chart has at most 1000 points
/// of a run; the least and the greatest value of each part are among them.
///
/// ```
/// use accelerator_track::{Report, Run, RunHistory};
///
/// # fn main() -> accelerator_track::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// # let runs = temporary.path();
/// let run = Run::builder("mnist").runs_folder(runs).start()?;
/// run.log("train", [("loss", 0.5)], 1, None);
/// let folder = run.folder().to_owned();
/// run.finish()?;
///
/// let history = RunHistory::read(folder)?;
/// Report::of(&[history]).write(runs.join("mnist.html"))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Report<'a> {
    runs: &'a [RunHistory],
}

impl<'a> Report<'a> {
    /// A report of these runs, in this order.
    #[must_use]
    pub fn of(runs: &'a [RunHistory]) -> Self {
        Self { runs }
    }

    /// Writes the page to a file, which it replaces as a whole or not at all. An image whose file is missing is named in
    /// its place.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn write(&self, file: impl AsRef<Path>) -> Result<()> {
        let file = file.as_ref();
        let runs = self.page_runs();
        let title = match runs.as_slice() {
            [run] => run.label.clone(),
            runs => format!("Comparison of {} runs", runs.len()),
        };
        let page = runs_page(&title, &PageData::of(runs.iter().collect()));
        write_output(file, |file| file.write_all(page.as_bytes()))
            .map_err(|error| Error::io("write the report", file, error))
    }

    /// Labels runs from different folders by their paths if they would have the same label.
    fn page_runs(&self) -> Vec<PageRun> {
        let points = points_of(self.runs.len());
        let runs = self.runs.iter().enumerate();
        let mut runs: Vec<PageRun> = runs.map(|(i, run)| PageRun::of(run, i, points)).collect();
        let mut count = HashMap::new();
        for run in &runs {
            *count.entry(run.label.clone()).or_insert(0) += 1;
        }
        for (run, history) in runs.iter_mut().zip(self.runs) {
            if count[&run.label] > 1 {
                run.label = history.folder.display().to_string();
            }
        }
        runs
    }
}

/// The points of each run in a chart: the more runs, the fewer.
pub(crate) fn points_of(runs: usize) -> usize {
    (MOST_POINTS * 20 / runs.max(1)).clamp(200, MOST_POINTS)
}

const MOST_POINTS: usize = 1000;

/// A page of one's own: one HTML file that asks no network for anything, with the style and the charts of reports.
///
/// Its program is JavaScript that fills the element `app` from the JSON in the element `data`. Before it run the
/// reports' own helpers, among them `h` (an element whose texts are never markup), `fmt` (a number to read) and
/// `Chart`.
///
/// ```
/// use accelerator_track::internal::HtmlPage;
///
/// let page = HtmlPage {
///     title: "Losses <of today>",
///     data: "[0.5, 0.25]",
///     program: "document.getElementById('app').append(h('p', {}, document.getElementById('data').textContent));",
///     style: "",
///     text: "0.5 0.25",
/// };
/// assert!(page.html().contains("<title>Losses &lt;of today&gt;</title>"));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct HtmlPage<'a> {
    /// Text.
    pub title: &'a str,
    /// JSON. Whatever its strings are, they stay data.
    pub data: &'a str,
    /// JavaScript, which has no `</` and no `<!--`.
    pub program: &'a str,
    /// CSS besides that of reports, which has no `</`.
    pub style: &'a str,
    /// The text for browsers that run no scripts.
    pub text: &'a str,
}

impl HtmlPage<'_> {
    /// The page.
    #[must_use]
    pub fn html(&self) -> String {
        document(&Document {
            title: self.title,
            data: &script_json(self.data),
            fallback: &format!("<pre>{}</pre>", escape(self.text)),
            secret: self.data,
            asks: Asks::Nobody,
            style: &[STYLE, self.style],
            script: &[
                "\"use strict\";\n(() => {\n",
                CHARTS,
                self.program,
                "})();\n",
            ],
        })
    }
}

/// The page of a report or a board as HTML.
pub(crate) fn runs_page(title: &str, data: &PageData<'_>) -> String {
    let asks = match data.board {
        None => Asks::Nobody,
        Some(_) => Asks::ItsServer,
    };
    let summary = summary(&data.runs);
    let data = serde_json::to_string(data).unwrap_or_default();
    document(&Document {
        title,
        data: &script_json(&data),
        fallback: &format!("<p>Charts need JavaScript. These are the values.</p>{summary}"),
        secret: &data,
        asks,
        style: &[STYLE],
        script: &[SCRIPT],
    })
}

struct Document<'a> {
    title: &'a str,
    /// JSON without `<`.
    data: &'a str,
    /// Markup for readers who run no scripts.
    fallback: &'a str,
    /// The source of the nonce.
    secret: &'a str,
    asks: Asks,
    style: &'a [&'a str],
    script: &'a [&'a str],
}

/// The place from which a page may get more data.
#[derive(Clone, Copy, Debug)]
enum Asks {
    Nobody,
    ItsServer,
}

/// A script or a style runs if it has the page's nonce: the hash of the data, which nothing within the data can know.
fn document(document: &Document<'_>) -> String {
    let connect = match document.asks {
        Asks::Nobody => "'none'",
        Asks::ItsServer => "'self'",
    };
    let nonce = ContentHash::of(document.secret.as_bytes()).to_string();
    let title = escape(document.title);
    let (data, fallback) = (document.data, document.fallback);
    let (style, script) = (document.style.concat(), document.script.concat());
    format!(
        r##"<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{title}</title>
<style nonce="{nonce}">{style}</style>
</head>
<body>
<svg id="svg" width="0" height="0" aria-hidden="true"></svg>
<div id="app"></div>
<noscript><main><h1>{title}</h1>{fallback}</main></noscript>
<script type="application/json" id="data" nonce="{nonce}">{data}</script>
<script nonce="{nonce}">{script}</script>
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
fn summary(runs: &[&PageRun]) -> String {
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
const CHARTS: &str = concat!(include_str!("page/dom.js"), include_str!("page/chart.js"));
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
