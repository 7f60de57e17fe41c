//! The report of a search in a real browser.

#![cfg(unix)]
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "these are tests, helpers included"
)]

#[path = "../../../track/tests/browser/chromium.rs"]
mod chromium;

use std::path::{Path, PathBuf};

use accelerator_tune::{
    Asha, Display, Mode, Objective, Results, Search, Space, TrialStatus, grid_search, loguniform,
    uniform,
};
use chromium::Chromium;

/// A value that is markup unless it is escaped.
const HOSTILE: &str = r#"</script><script>document.title="owned"</script> "quoted" & 'é' 😀"#;

#[test]
fn a_report_shows_the_search_and_asks_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let results = search(folder.path());
    let file = folder.path().join("report.html");
    let Some(chromium) = Chromium::find("a search's report in a browser") else {
        return;
    };
    let url = format!("file://{}", file.display());
    let mut page = chromium.open(&url);
    page.wait_until("document.documentElement.dataset.drawn === 'yes'");
    let markup = page.markup();
    let (best, value) = results
        .best_trial("loss", Mode::Min, Default::default())
        .unwrap();
    let status = |status| {
        results
            .trials()
            .iter()
            .filter(|x| x.status == status)
            .count()
    };
    let errors = status(TrialStatus::Error);
    assert_eq!(errors, 6);
    for text in [
        best.name.as_str(),
        &format!("{errors} ERROR"),
        "best configuration",
        "Using AsyncHyperBand",
        "&lt;/script&gt;&lt;script&gt;document.title=",
    ] {
        assert!(markup.contains(text), "{text}: {markup}");
    }
    assert_eq!(page.evaluate("document.title"), "digits");
    for section in ["summary", "parameters", "rungs", "curves", "trials"] {
        page.wait_until(&format!("document.querySelector('#{section}') !== null"));
    }
    // Every canvas shows something.
    page.wait_until(
        "[...document.querySelectorAll('canvas')].length === 3 && [...document.querySelectorAll('canvas')].every((canvas) =>
           canvas.width > 0 && canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some((x) => x))",
    );
    assert!(page.complaints.is_empty(), "{:?}", page.complaints);
    assert_eq!(page.requests, [url]);

    // The table begins with the best trial and can be sorted by any column.
    let first = "document.querySelector('#trials tbody tr th').innerText.trim()";
    assert_eq!(page.evaluate(first), best.name.as_str());
    assert_eq!(
        page.evaluate("document.querySelectorAll('#trials tbody tr').length"),
        results.trials().len()
    );
    let press = |name: &str| {
        format!(
            "[...document.querySelectorAll('#trials thead button')].find((x) => x.innerText === '{name}').click()"
        )
    };
    page.evaluate(&press("trial"));
    assert_eq!(page.evaluate(first), results.trials()[0].name.as_str());
    page.evaluate(&press("trial"));
    assert_eq!(
        page.evaluate(first),
        results.trials().last().unwrap().name.as_str()
    );
    page.evaluate(
        "{ const x = document.querySelector('#trials input'); x.value = 'ERROR'; x.dispatchEvent(new Event('input')) }",
    );
    assert_eq!(
        page.evaluate("document.querySelectorAll('#trials tbody tr').length"),
        errors
    );

    // Keys and the pointer name trials in the plot. The keys begin with the best.
    let tip = "document.querySelector('.parallel .tip').innerText";
    page.evaluate(
        "document.querySelector('.parallel canvas').dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowUp' }))",
    );
    let named = page.evaluate(tip);
    assert!(named.as_str().unwrap().contains(&best.name), "{named}");
    // The program prints six digits.
    assert!(
        named.as_str().unwrap().contains(&value.to_string()),
        "{named}"
    );
    page.evaluate(
        "{ const canvas = document.querySelector('.parallel canvas'); const at = canvas.getBoundingClientRect();
           canvas.dispatchEvent(new PointerEvent('pointerleave'));
           for (let y = 30; y < at.height && document.querySelector('.parallel .tip').hidden; y += 4)
             canvas.dispatchEvent(new PointerEvent('pointermove', { clientX: at.left + at.width / 2, clientY: at.top + y })) }",
    );
    let named = page.evaluate(tip);
    let is_named = results
        .trials()
        .iter()
        .any(|trial| named.as_str().unwrap().contains(&trial.name));
    assert!(is_named, "{named}");
    assert!(page.complaints.is_empty(), "{:?}", page.complaints);
}

#[test]
#[ignore = "makes pictures, in the folder that TUNE_TESTS_PICTURES names, for someone to look at"]
fn pictures() {
    let folder = PathBuf::from(std::env::var_os("TUNE_TESTS_PICTURES").unwrap());
    let chromium = Chromium::find("pictures").unwrap();
    let temporary = tempfile::tempdir().unwrap();
    search(temporary.path());
    let url = format!("file://{}/report.html", temporary.path().display());
    for (place, arguments) in [
        ("desktop", &["--window-size=1440,2600"][..]),
        ("phone", &["--window-size=500,2600"]),
        (
            "dark",
            &[
                "--window-size=1440,2600",
                "--blink-settings=preferredColorScheme=0",
            ],
        ),
    ] {
        chromium.screenshot(&url, arguments, &folder.join(format!("tune-{place}.png")));
    }
}

/// Searches six rates with each of three optimizers, of which one fails.
fn search(folder: &Path) -> Results {
    let program = r#"BEGIN {{
        if (kind == "broken") {{ print "no such optimizer" > "/dev/stderr"; exit 3 }}
        for (i = 1; i <= 16; i++) {{
            print "{{\"loss\": " ((log(lr) + 4) ^ 2 / 10 + 1 / i) ", \"examples\": " (64 * i) "}}"; fflush()
        }}
    }}"#;
    Search::new("digits", Objective::new("loss", Mode::Min))
        .space(Space::new([
            ("lr", loguniform(1e-4, 1.0)),
            ("momentum", uniform(0.1, 0.9)),
            (
                "optimizer",
                grid_search(["adam".into(), HOSTILE.into(), "broken".into()]),
            ),
        ]))
        .num_samples(6)
        .seed(7)
        .slots(2)
        .scheduler(Asha {
            max_t: 16,
            reduction_factor: 2,
            ..Asha::default()
        })
        .folder(folder)
        .display(Display::Quiet)
        .run_programs(["awk", "-v", "lr={lr}", "-v", "kind={optimizer}", program])
        .unwrap()
}
