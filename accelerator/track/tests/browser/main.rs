//! Reports and the board in a real browser.

#![cfg(unix)]
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "these are tests, helpers included"
)]

mod chromium;
mod runs;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::Instant;

use accelerator_track::{Report, Run, RunHistory, internal::Board};
use chromium::{Chromium, OpenPage};
use runs::{HOSTILE, plain, rich};

#[test]
fn a_report_shows_what_was_logged_and_asks_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let histories = [rich(folder.path(), "mnist-wide", 1e-3)];
    let file = report(&folder, &histories);
    let page = std::fs::read_to_string(&file).unwrap();
    for address in ["http:", "https:", "//cdn", "src=\"/"] {
        assert!(!page.contains(address), "{address}");
    }
    assert!(page.contains("default-src 'none'") && page.contains("connect-src 'none'"));
    let Some(mut page) = shown(&file, "a report in a browser") else {
        return;
    };
    let body = page.markup();
    let loss = histories[0].series("test/loss").unwrap();
    let last = loss.points.last().unwrap().value;
    let least = loss
        .points
        .iter()
        .map(|x| x.value)
        .fold(f64::INFINITY, f64::min);
    for value in [last, least] {
        assert!(
            body.contains(&format!("title=\"{value} at step")),
            "{value}"
        );
    }
    for text in [
        "mnist-wide failed",
        "rank 1 ended by signal 9",
        "resumed from step 1,500",
        "optimizer.name",
        "AdamW",
        "target/release/train --lr 0.001 'two words'",
        "node-0",
        "data:image/png;base64,",
        "mnist:v3",
        "model:v1",
        "trace.json",
        "rank 0",
        "GiB",
        "not finite",
        "precision over recall",
        "4,000 values",
    ] {
        assert!(body.contains(text), "{text}: {body}");
    }
    // The text is complete, and none of it is markup.
    assert!(body.contains("&lt;/script&gt;&lt;script&gt;document.title="));
    assert_eq!(page.evaluate("document.title"), "mnist-wide");
    assert!(page.complaints.is_empty(), "{:?}", page.complaints);
    let asked = page.requests.iter().filter(|x| !x.starts_with("data:"));
    assert_eq!(asked.collect::<Vec<_>>(), [&url(&file)]);
    // A script in the page cannot send requests either.
    let refused =
        page.evaluate("fetch('http://127.0.0.1:1/').then(() => 'sent', (error) => String(error))");
    assert!(refused.as_str().unwrap().contains("Failed to fetch"));
    assert!(
        page.complaints
            .iter()
            .any(|x| x.contains("Content Security Policy"))
    );
}

#[test]
fn charts_follow_their_controls() {
    let folder = tempfile::tempdir().unwrap();
    let histories = [
        plain(folder.path(), "narrow", 2e-3),
        plain(folder.path(), "slow", 5e-4),
    ];
    let file = report(&folder, &histories);
    let Some(mut page) = shown(&file, "a report's controls") else {
        return;
    };
    let picture = "document.querySelector('.metric canvas').toDataURL()";
    let mut seen = vec![page.evaluate(picture)];
    for action in [
        "{ const x = document.querySelector('#metrics input[type=range]'); x.value = 0.9; x.dispatchEvent(new Event('input')) }",
        "document.querySelector('#metrics input[type=checkbox]').click()",
        "document.querySelector('#metrics input[value=epoch]').click()",
        "document.querySelector('#metrics input[value=time]').click()",
        "document.querySelector('.side .list input').click()",
    ] {
        page.evaluate(action);
        page.wait_until(&format!("{picture} !== {}", seen.last().unwrap()));
        seen.push(page.evaluate(picture));
    }
    page.evaluate(
        "{ const canvas = document.querySelector('.metric canvas'); const at = canvas.getBoundingClientRect();
           canvas.dispatchEvent(new PointerEvent('pointermove', { clientX: at.left + 150, clientY: at.top + 50 })) }",
    );
    let tip = page.evaluate("document.querySelector('.metric .tip').innerText");
    assert!(tip.as_str().unwrap().contains("slow"), "{tip}");
    page.evaluate(
        "{ const x = document.querySelector('#metrics input[type=search]'); x.value = 'accuracy'; x.dispatchEvent(new Event('input')) }",
    );
    let shown =
        page.evaluate("[...document.querySelectorAll('.metric')].filter((x) => !x.hidden).length");
    assert_eq!(shown, 1);
    assert!(page.complaints.is_empty(), "{:?}", page.complaints);
}

#[test]
fn runs_of_one_name_are_told_apart_by_their_folders() {
    let folder = tempfile::tempdir().unwrap();
    let (here, there) = (folder.path().join("here"), folder.path().join("there"));
    let mut histories: Vec<_> = (0..8).map(|_| plain(&here, "mnist", 1e-3)).collect();
    for runs in [&here, &there] {
        histories.push(plain(runs, "same", 1e-3));
    }
    let file = report(&folder, &histories);
    let html = std::fs::read_to_string(&file).unwrap();
    for heading in ["<h2>mnist: ", "<h2>mnist-8: ", "there/same: "] {
        assert!(html.contains(heading), "{heading}");
    }
    let Some(mut page) = shown(&file, "runs of one name") else {
        return;
    };
    let texts = |selector: &str| {
        format!("[...document.querySelectorAll('{selector}')].map((x) => x.textContent)")
    };
    for selector in [
        ".side .name",
        "#overview tbody th",
        ".metric .legend tbody th",
    ] {
        let distinct = format!("new Set({}).size", texts(selector));
        assert_eq!(page.evaluate(&distinct), 10, "{selector}");
    }
    // With this number of runs, a legend shows all of them.
    page.evaluate("document.querySelector('.metric .legend').id = 'legend'");
    let hidden = page.evaluate("legend.scrollHeight - legend.clientHeight");
    assert_eq!(hidden, 0);
    page.evaluate(
        "{ const x = document.querySelector('.side input[type=search]'); x.value = 'mnist-3'; x.dispatchEvent(new Event('input')) }",
    );
    assert_eq!(
        page.evaluate(&texts(".side .name")),
        serde_json::json!(["mnist-3"])
    );
    assert!(page.complaints.is_empty(), "{:?}", page.complaints);
}

#[test]
fn names_that_are_markup_stay_text() {
    let folder = tempfile::tempdir().unwrap();
    let histories = [rich(folder.path(), HOSTILE, 1e-3)];
    let file = report(&folder, &histories);
    let page = std::fs::read_to_string(&file).unwrap();
    assert_eq!(
        page.matches("<script").count(),
        2,
        "the data and the program"
    );
    assert_eq!(page.matches("</script>").count(), 2);
    let Some(mut page) = shown(&file, "markup in names") else {
        return;
    };
    assert_eq!(page.evaluate("document.title"), HOSTILE);
    assert_eq!(
        page.evaluate("document.querySelector('h1').textContent"),
        HOSTILE
    );
    assert!(page.complaints.is_empty(), "{:?}", page.complaints);
}

#[test]
fn a_comparison_shows_what_differs() {
    let folder = tempfile::tempdir().unwrap();
    let histories = [
        rich(folder.path(), "wide", 1e-3),
        plain(folder.path(), "narrow", 2e-3),
        plain(folder.path(), "slow", 5e-4),
    ];
    let file = report(&folder, &histories);
    let Some(mut page) = shown(&file, "a comparison in a browser") else {
        return;
    };
    let body = page.markup();
    for text in [
        "Comparison of 3 runs",
        "narrow",
        "0.0005",
        "class=\"differs\"",
        "distilled:v1",
    ] {
        assert!(body.contains(text), "{text}");
    }
    let words = "narrow: last";
    assert!(body.contains(words), "a chart tells all its runs: {words}");
}

#[test]
fn the_board_shows_values_that_are_logged_while_it_is_open() {
    let folder = tempfile::tempdir().unwrap();
    plain(folder.path(), "before", 1e-3);
    let url = serve(folder.path());
    let start = |name: &str| {
        Run::builder(name)
            .runs_folder(folder.path())
            .start()
            .unwrap()
    };
    let run = start("live");
    run.log("train", [("loss", 0.625)], 1, None);
    run.log_image("samples/digits", include_bytes!("digit.png"), 1)
        .unwrap();
    run.flush().unwrap();
    let Some(chromium) = Chromium::find("the board in a browser") else {
        return;
    };
    let mut page = chromium.open(&url);
    page.wait_until("document.querySelector('.badge.running') !== null");
    page.wait_until(r#"document.querySelector("td[title='0.625 at step 1']") !== null"#);
    page.wait_until("document.querySelector('img').naturalWidth === 28");
    page.wait_until(ALL_CHARTS);
    run.log("train", [("loss", 0.25), ("late", f64::NAN)], 2, None);
    run.flush().unwrap();
    page.wait_until(r#"document.querySelector("td[title='0.25 at step 2']") !== null"#);
    page.wait_until("document.body.innerText.includes('train/late')");
    let late = start("late");
    page.wait_until("document.querySelector('.side').innerText.includes('late')");
    late.finish().unwrap();
    run.fail("out of memory").unwrap();
    page.wait_until("document.querySelector('#overview').innerText.includes('out of memory')");
    assert!(page.complaints.is_empty(), "{:?}", page.complaints);
    let origin = url.split("?").next().unwrap();
    for asked in &page.requests {
        assert!(
            asked.starts_with(origin) || asked.starts_with("data:"),
            "{asked}"
        );
    }
}

#[test]
fn the_board_answers_those_with_the_token() {
    let folder = tempfile::tempdir().unwrap();
    plain(folder.path(), "a", 1e-3);
    let url = serve(folder.path());
    let (address, token) = url["http://".len()..].split_once("/?token=").unwrap();
    let get = |path: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let status = |answer: &str| answer[9..12].parse::<u16>().unwrap();
    let good = get(&format!("/?token={token}"));
    assert_eq!(status(&good), 200);
    assert!(good.contains("frame-ancestors 'none'"));
    assert_eq!(status(&get("/")), 403);
    assert_eq!(status(&get("/data?since=0")), 403);
    assert_eq!(status(&get("/?token=")), 403);
    let other = format!("/?token={}", "0".repeat(32));
    assert_eq!(status(&get(&other)), 403);
    let data = get(&format!("/data?token={token}&since=0"));
    assert!(data.contains("application/json") && data.contains("train/loss"));
    let elsewhere = format!("/../etc/passwd?token={token}");
    assert_eq!(status(&get(&elsewhere)), 404);
}

#[test]
#[ignore = "makes pictures, in the folder that TRACK_TESTS_PICTURES names, for someone to look at"]
fn pictures() {
    let folder = PathBuf::from(std::env::var_os("TRACK_TESTS_PICTURES").unwrap());
    let chromium = Chromium::find("pictures").unwrap();
    let runs = tempfile::tempdir().unwrap();
    let histories = [
        rich(runs.path(), "mnist-wide", 1e-3),
        plain(runs.path(), "mnist-narrow", 2e-3),
        plain(runs.path(), "mnist-slow", 5e-4),
    ];
    for (name, shown) in [("run", &histories[..1]), ("comparison", &histories[..])] {
        let page = folder.join(format!("{name}.html"));
        Report::of(shown).write(&page).unwrap();
        for (place, arguments) in [
            ("desktop", &["--window-size=1440,4200"][..]),
            ("phone", &["--window-size=500,3600"]),
            (
                "dark",
                &[
                    "--window-size=1440,4200",
                    "--blink-settings=preferredColorScheme=0",
                ],
            ),
        ] {
            let picture = folder.join(format!("{name}-{place}.png"));
            chromium.screenshot(&url(&page), arguments, &picture);
        }
    }
}

#[test]
#[ignore = "takes a minute, and measures: run it by itself, optimized"]
fn a_hundred_runs_of_a_hundred_thousand_points() {
    let folder = tempfile::tempdir().unwrap();
    for at in 0..100u64 {
        let run = Run::builder(&format!("run-{at}"))
            .runs_folder(folder.path())
            .start()
            .unwrap();
        for step in 0..100_000 {
            let x = step as f64;
            let loss =
                2.0 * (-x / 3e4).exp() + ((x + at as f64) * 0.7).sin() * 0.1 + at as f64 * 0.01;
            run.log("train", [("loss", loss)], step, x / 1000.0);
        }
        run.finish().unwrap();
    }
    let Some(chromium) = Chromium::find("a hundred runs in a browser") else {
        return;
    };
    let url = serve(folder.path());
    let time = |page: &mut OpenPage| {
        page.wait_until("document.documentElement.dataset.firstChart !== undefined");
        let time = page.evaluate("Number(document.documentElement.dataset.firstChart)");
        time.as_f64().unwrap()
    };
    let start = Instant::now();
    let mut page = chromium.open(&url);
    let cold = time(&mut page);
    page.wait_until("document.querySelectorAll('.side .list label').length === 100 && !document.querySelector('header').innerText.includes('reading')");
    let all = start.elapsed();
    drop(page);
    let warm = time(&mut chromium.open(&url));
    println!(
        "the first chart is there after {cold} ms while 100 runs of 100,000 points are read, and after {warm} ms when they are, {all:?} later"
    );
    assert!(cold <= 1000.0 && warm <= 1000.0);
}

/// Writes a report into the folder.
fn report(folder: &tempfile::TempDir, histories: &[RunHistory]) -> PathBuf {
    let file = folder.path().join("report.html");
    Report::of(histories).write(&file).unwrap();
    file
}

/// Opens a report, and waits for its charts. Returns `None` if there is no browser.
fn shown(file: &Path, what: &str) -> Option<OpenPage> {
    let mut page = Chromium::find(what)?.open(&url(file));
    page.wait_until(ALL_CHARTS);
    Some(page)
}

fn serve(runs: &Path) -> String {
    let board = Board::bind(runs, 0).unwrap();
    let url = board.url();
    std::thread::spawn(move || board.serve());
    url
}

fn url(file: &Path) -> String {
    format!("file://{}", PathBuf::from(file).display())
}

/// Tells whether every chart in the window has a line or says that there is none.
const ALL_CHARTS: &str = "document.documentElement.dataset.firstChart !== undefined && document.querySelector('#details').innerText !== ''";
