//! Reports and the board in a real browser.

mod chromium;
mod runs;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use accelerator_track::{Board, Report, Run};
use chromium::Chromium;
use runs::{HOSTILE, plain, rich};

#[test]
fn a_report_shows_what_was_logged_and_asks_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let histories = [rich(folder.path(), "mnist-wide", 1e-3)];
    let file = folder.path().join("report.html");
    Report::of(&histories).write(&file).unwrap();
    let page = std::fs::read_to_string(&file).unwrap();
    for address in ["http:", "https:", "//cdn", "src=\"/"] {
        assert!(!page.contains(address), "{address}");
    }
    assert!(page.contains("default-src 'none'") && page.contains("connect-src 'none'"));
    let Some(chromium) = Chromium::find("a report in a browser") else {
        return;
    };
    let dom = chromium.dump(&url(&file), 4000);
    let body = app_of(&dom);
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
    // As text it is all there; as markup it is not.
    assert!(body.contains("&lt;/script&gt;&lt;script&gt;document.title="));
    assert!(!dom.contains("<title>owned") && dom.contains("<title>mnist-wide</title>"));
}

#[test]
fn names_that_are_markup_stay_text() {
    let folder = tempfile::tempdir().unwrap();
    let histories = [rich(folder.path(), HOSTILE, 1e-3)];
    let page = Report::of(&histories).html();
    assert_eq!(
        page.matches("<script").count(),
        2,
        "the data and the program"
    );
    assert_eq!(page.matches("</script>").count(), 2);
    let Some(chromium) = Chromium::find("markup in names") else {
        return;
    };
    let file = folder.path().join("report.html");
    Report::of(&histories).write(&file).unwrap();
    let dom = chromium.dump(&url(&file), 3000);
    assert!(!dom.contains("<title>owned"), "a name became a script");
    assert!(app_of(&dom).contains("\"quoted\" &amp; 'é' 😀"));
}

#[test]
fn a_comparison_shows_what_differs() {
    let folder = tempfile::tempdir().unwrap();
    let histories = [
        rich(folder.path(), "wide", 1e-3),
        plain(folder.path(), "narrow", 2e-3),
        plain(folder.path(), "slow", 5e-4),
    ];
    let file = folder.path().join("report.html");
    Report::of(&histories).write(&file).unwrap();
    let Some(chromium) = Chromium::find("a comparison in a browser") else {
        return;
    };
    let dom = chromium.dump(&url(&file), 4000);
    let body = app_of(&dom);
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
    let run = Run::builder("live")
        .runs_folder(folder.path())
        .start()
        .unwrap();
    run.log("train", [("loss", 0.625)], 1, None);
    run.log_image("samples/digits", include_bytes!("digit.png"), 1)
        .unwrap();
    run.flush().unwrap();
    let Some(chromium) = Chromium::find("the board in a browser") else {
        return;
    };
    // The browser's time runs fast: what is logged while the page is open is logged before it is dumped.
    let logging = std::thread::spawn(move || {
        let end = Instant::now() + Duration::from_secs(12);
        let mut step = 2;
        while Instant::now() < end {
            run.log("train", [("loss", 0.25)], step, None);
            std::thread::sleep(Duration::from_millis(50));
            step += 1;
        }
        run
    });
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let dom = chromium.dump(&url, 8000);
        let body = app_of(&dom);
        let is_live = body.contains("running") && body.contains("title=\"0.25 at step");
        if is_live
            && body.contains("title=\"0.625 at step 1\"")
            && body.contains("before")
            && body.contains("api/blob?run=")
        {
            break;
        }
        assert!(Instant::now() < deadline, "{body}");
    }
    logging.join().unwrap().finish().unwrap();
}

#[test]
fn the_board_answers_those_with_the_token_on_this_machine() {
    let folder = tempfile::tempdir().unwrap();
    plain(folder.path(), "a", 1e-3);
    let url = serve(folder.path());
    let (address, token) = url["http://".len()..].split_once("/?token=").unwrap();
    let get = |path: &str, host: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let status = |answer: &str| answer[9..12].parse::<u16>().unwrap();
    let good = get(&format!("/?token={token}"), address);
    assert_eq!(status(&good), 200);
    assert!(good.contains("HttpOnly; SameSite=Strict") && good.contains("frame-ancestors 'none'"));
    assert_eq!(status(&get("/", address)), 403);
    assert_eq!(status(&get("/api/runs", address)), 403);
    assert_eq!(status(&get("/?token=", address)), 403);
    assert_eq!(
        status(&get(&format!("/?token={}", "0".repeat(32)), address)),
        403
    );
    for host in ["evil.example", "127.0.0.1", "127.0.0.1.evil.example:80", ""] {
        assert_eq!(
            status(&get(&format!("/?token={token}"), host)),
            421,
            "{host}"
        );
    }
    for path in [
        "/../etc/passwd",
        "/api/blob?run=0&hash=../journal.jsonl",
        "/api/trace?run=0&name=lock",
        "/api/run?id=99",
    ] {
        let separator = if path.contains('?') { '&' } else { '?' };
        assert_eq!(
            status(&get(&format!("{path}{separator}token={token}"), address)),
            404,
            "{path}"
        );
    }
}

#[test]
#[ignore = "makes pictures, in the folder that ACCEL_TRACK_PICTURES names, for someone to look at"]
fn pictures() {
    let folder = PathBuf::from(std::env::var_os("ACCEL_TRACK_PICTURES").unwrap());
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
    let time_in = |dom: &str| -> f64 {
        let (_, rest) = dom
            .split_once("data-first-chart=\"")
            .expect("no chart was shown");
        rest.split('"').next().unwrap().parse().unwrap()
    };
    let url = serve(folder.path());
    let cold = time_in(&chromium.dump(&url, 3000));
    let deadline = Instant::now() + Duration::from_secs(120);
    let warm = loop {
        let dom = chromium.dump(&url, 3000);
        if app_of(&dom).contains("run-99") && !app_of(&dom).contains("reading") {
            break time_in(&dom);
        }
        assert!(Instant::now() < deadline);
    };
    println!(
        "first chart of 100 runs of 100,000 points: {cold} ms while they are read, {warm} ms when they are"
    );
    assert!(cold <= 1000.0 && warm <= 1000.0);
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

/// What the scripts made of the data, which itself is in the page too.
fn app_of(dom: &str) -> &str {
    let from = dom.find("<div id=\"app\">").unwrap();
    let to = dom.find("<noscript>").unwrap();
    &dom[from..to]
}
