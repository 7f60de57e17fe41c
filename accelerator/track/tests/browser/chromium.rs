//! A real browser, controlled over its debugging pipe.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

/// An installed Chromium.
pub(crate) struct Chromium {
    program: PathBuf,
}

/// An open page.
pub(crate) struct OpenPage {
    child: Child,
    to: File,
    from: Receiver<Value>,
    session: Option<String>,
    sent: u64,
    /// The addresses that the page requested.
    pub(crate) requests: Vec<String>,
    /// Errors of scripts, and requests that the policy refused.
    pub(crate) complaints: Vec<String>,
    profile: TempDir,
}

impl Chromium {
    /// Finds Chromium. If there is none, prints a line and returns `None`, or fails if `TRACK_TESTS_REQUIRE` is 1.
    pub(crate) fn find(test: &str) -> Option<Self> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let program = std::env::split_paths(&path)
            .map(|folder| folder.join("chromium"))
            .find(|program| program.is_file());
        if program.is_none() {
            let words = format!(
                "SKIPPED: {test}: there is no `chromium` in PATH; tests/track/install chromium brings it"
            );
            let is_required = std::env::var("TRACK_TESTS_REQUIRE").as_deref() == Ok("1");
            assert!(!is_required, "{words}");
            // The test harness does not capture this, unlike the output of macros.
            let _ = writeln!(std::io::stderr(), "{words}");
        }
        program.map(|program| Self { program })
    }

    pub(crate) fn open(&self, url: &str) -> OpenPage {
        let profile = tempfile::tempdir().unwrap();
        let (to, from) = (profile.path().join("to"), profile.path().join("from"));
        let made = Command::new("mkfifo").args([&to, &from]).status().unwrap();
        assert!(made.success());
        let child = Command::new("sh")
            .args(["-c", r#"exec "$@" 3<"$0/to" 4>"$0/from""#])
            .arg(profile.path())
            .arg(&self.program)
            .args(ARGUMENTS)
            .arg("--remote-debugging-pipe")
            .arg("--window-size=1400,1000")
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(profile.path().join("log")).unwrap())
            .spawn()
            .unwrap();
        let to = OpenOptions::new().write(true).open(to).unwrap();
        let mut answers = BufReader::new(File::open(from).unwrap());
        let (sender, from) = mpsc::channel();
        thread::spawn(move || {
            let mut message = Vec::new();
            while answers
                .read_until(0, &mut message)
                .is_ok_and(|read| read > 0)
            {
                message.pop();
                let value = serde_json::from_slice(&message).unwrap_or_default();
                if sender.send(value).is_err() {
                    break;
                }
                message.clear();
            }
        });
        let mut page = OpenPage {
            child,
            to,
            from,
            session: None,
            sent: 0,
            requests: Vec::new(),
            complaints: Vec::new(),
            profile,
        };
        let target = page.ask("Target.createTarget", json!({ "url": "about:blank" }));
        let target = json!({ "targetId": target["targetId"], "flatten": true });
        let attached = page.ask("Target.attachToTarget", target);
        page.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Network", "Runtime", "Log", "Page"] {
            page.ask(&format!("{domain}.enable"), json!({}));
        }
        page.ask("Page.navigate", json!({ "url": url }));
        page
    }

    /// Takes a screenshot of the page.
    pub(crate) fn screenshot(&self, url: &str, arguments: &[&str], file: &Path) {
        let profile = tempfile::tempdir().unwrap();
        let status = Command::new(&self.program)
            .args(ARGUMENTS)
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .args(["--hide-scrollbars", "--virtual-time-budget=4000"])
            .args(arguments)
            .arg(format!("--screenshot={}", file.display()))
            .arg(url)
            .stderr(Stdio::null())
            .status()
            .unwrap();
        assert!(status.success());
    }
}

impl OpenPage {
    /// Returns the value of an expression as JSON.
    pub(crate) fn evaluate(&mut self, expression: &str) -> Value {
        let arguments =
            json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let mut answer = self.ask("Runtime.evaluate", arguments);
        answer["result"]["value"].take()
    }

    /// Waits until an expression is true.
    pub(crate) fn wait_until(&mut self, expression: &str) {
        let deadline = Instant::now() + PATIENCE;
        while self.evaluate(expression) != json!(true) {
            let body = if Instant::now() < deadline {
                Value::Null
            } else {
                self.evaluate("document.body.innerText")
            };
            assert!(
                body.is_null(),
                "{expression} does not become true: {:?} {body}",
                self.complaints
            );
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the markup that the page's scripts have made.
    pub(crate) fn markup(&mut self) -> String {
        let markup = self.evaluate("document.getElementById('app').outerHTML");
        markup.as_str().unwrap().to_owned()
    }

    fn ask(&mut self, method: &str, params: Value) -> Value {
        self.sent += 1;
        let mut question = json!({ "id": self.sent, "method": method, "params": params });
        if let Some(session) = &self.session {
            question["sessionId"] = json!(session);
        }
        self.to
            .write_all(format!("{question}\0").as_bytes())
            .unwrap();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(mut message) = self.from.recv_timeout(left) else {
                let log = fs::read_to_string(self.profile.path().join("log"));
                panic!("no answer to {method}: {}", log.unwrap_or_default());
            };
            if message["id"] == json!(self.sent) {
                assert_eq!(message["error"], Value::Null, "{method}");
                return message["result"].take();
            }
            let params = &message["params"];
            match message["method"].as_str() {
                Some("Network.requestWillBeSent") => {
                    let url = params["request"]["url"].as_str().unwrap();
                    self.requests.push(url.to_owned());
                }
                Some("Runtime.exceptionThrown") => {
                    self.complaints.push(params["exceptionDetails"].to_string());
                }
                Some("Log.entryAdded") => self.complaints.push(params["entry"].to_string()),
                _ => {}
            }
        }
    }
}

impl Drop for OpenPage {
    fn drop(&mut self) {
        // The browser may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const PATIENCE: Duration = Duration::from_secs(60);
const ARGUMENTS: [&str; 9] = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
];
