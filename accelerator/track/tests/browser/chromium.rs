//! A real browser.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Chromium, where it is installed.
pub(crate) struct Chromium {
    program: PathBuf,
}

impl Chromium {
    /// None where there is none, which is said, and is a failure where `ACCEL_TRACK_REQUIRE` is 1.
    pub(crate) fn find(test: &str) -> Option<Self> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let program = std::env::split_paths(&path)
            .map(|folder| folder.join("chromium"))
            .find(|program| program.is_file());
        if program.is_none() {
            let words = format!(
                "SKIPPED: {test}: there is no `chromium` in PATH; tests/track/install chromium brings it"
            );
            assert_ne!(
                std::env::var("ACCEL_TRACK_REQUIRE").as_deref(),
                Ok("1"),
                "{words}"
            );
            println!("{words}");
            eprintln!("{words}");
        }
        program.map(|program| Self { program })
    }

    /// The document after its scripts have run for `ms` of the page's time.
    pub(crate) fn dump(&self, url: &str, ms: u32) -> String {
        let out = self.run(
            url,
            &[
                format!("--virtual-time-budget={ms}"),
                "--dump-dom".to_owned(),
            ],
        );
        String::from_utf8(out).unwrap()
    }

    /// A picture of the page.
    pub(crate) fn screenshot(&self, url: &str, arguments: &[&str], file: &Path) {
        let mut all: Vec<String> = arguments.iter().map(|x| (*x).to_owned()).collect();
        all.push("--hide-scrollbars".to_owned());
        all.push("--virtual-time-budget=4000".to_owned());
        all.push(format!("--screenshot={}", file.display()));
        self.run(url, &all);
    }

    /// What it writes to standard output. Names of other hosts lead nowhere; each request is in the log that is given.
    fn run(&self, url: &str, arguments: &[String]) -> Vec<u8> {
        let profile = tempfile::tempdir().unwrap();
        let (out, log) = (profile.path().join("out"), profile.path().join("log"));
        let mut child = Command::new(&self.program)
            .args([
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
            ])
            .args([
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
            ])
            .args([
                "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
                "--enable-logging=stderr",
            ])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .args(arguments)
            .arg(url)
            .stdout(fs::File::create(&out).unwrap())
            .stderr(fs::File::create(&log).unwrap())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(120);
        while child.try_wait().unwrap().is_none() {
            if Instant::now() > deadline {
                child.kill().unwrap();
                child.wait().unwrap();
                panic!(
                    "chromium does not end: {}",
                    fs::read_to_string(&log).unwrap_or_default()
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let log = fs::read_to_string(log).unwrap_or_default();
        let complaints: Vec<&str> = log
            .lines()
            .filter(|line| line.contains("CONSOLE"))
            .collect();
        assert!(complaints.is_empty(), "the page complains: {complaints:#?}");
        fs::read(out).unwrap()
    }
}
