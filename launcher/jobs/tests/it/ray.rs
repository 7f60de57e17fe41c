//! The engine Ray, with a server instead of its dashboard.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use serde_json::{Value, json};

use crate::support::{Jobs, launcher};

/// A dashboard with its jobs, which records its requests.
struct Dashboard {
    address: String,
    jobs: Arc<Mutex<BTreeMap<String, Value>>>,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Dashboard {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let dashboard = Self {
            address: format!("http://{}", listener.local_addr().unwrap()),
            jobs: Arc::default(),
            asked: Arc::default(),
        };
        let (jobs, asked) = (Arc::clone(&dashboard.jobs), Arc::clone(&dashboard.asked));
        // The thread ends with the process.
        thread::spawn(move || {
            for connection in listener.incoming() {
                answer(connection.unwrap(), &jobs, &asked);
            }
        });
        dashboard
    }

    /// Replaces a job with another user's job of the same name.
    fn replace(&self, name: &str) {
        let other = json!({"status": "RUNNING", "entrypoint": "python other.py", "metadata": {"accel-jobs/nonce": "other"}});
        self.jobs.lock().unwrap().insert(name.to_owned(), other);
    }

    /// Replaces a job with the entry that Ray makes for a job that it cannot find.
    fn lose(&self, name: &str) {
        let made =
            json!({"status": "FAILED", "entrypoint": "Entrypoint not found.", "metadata": null});
        self.jobs.lock().unwrap().insert(name.to_owned(), made);
    }

    fn set_status(&self, name: &str, status: &str) {
        self.jobs.lock().unwrap().get_mut(name).unwrap()["status"] = status.into();
    }

    /// Returns the requests since the last call.
    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }
}

fn answer(
    connection: TcpStream,
    jobs: &Mutex<BTreeMap<String, Value>>,
    asked: &Mutex<Vec<String>>,
) {
    let mut reader = BufReader::new(connection);
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if line.trim().is_empty() {
            break;
        }
        lines.push(line.trim().to_lowercase());
    }
    let Some(request) = lines
        .first()
        .and_then(|line| line.strip_suffix(" http/1.1"))
    else {
        return;
    };
    let length = lines
        .iter()
        .find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
    reader.read_exact(&mut body).unwrap();
    asked.lock().unwrap().push(request.to_owned());
    let mut jobs = jobs.lock().unwrap();
    let words: Vec<_> = request.split(['/', ' ']).collect();
    let answer = match words[..] {
        ["get", "", "api", "version"] => Some(json!({"ray_version": "2.60.0"})),
        [_, "", "api", "packages", ..] => Some(json!({})),
        ["post", "", "api", "jobs", ""] => {
            let mut job: Value = serde_json::from_slice(&body).unwrap();
            job["status"] = "RUNNING".into();
            let name = job["submission_id"].as_str().unwrap().to_owned();
            jobs.insert(name, job);
            Some(json!({}))
        }
        ["get", "", "api", "jobs", name] => jobs.get(name).cloned(),
        ["get", "", "api", "jobs", _, "logs"] => Some(json!({"logs": "of somebody\n"})),
        ["post", "", "api", "jobs", name, "stop"] => jobs.get_mut(name).map(|job| {
            job["status"] = "STOPPED".into();
            json!({"stopped": true})
        }),
        ["delete", "", "api", "jobs", name] => jobs.remove(name).map(|_| json!({"deleted": true})),
        _ => None,
    };
    let (status, text) = match answer {
        Some(answer) => ("200 OK", answer.to_string()),
        None => (
            "404 Not Found",
            "RuntimeError: Job does not exist".to_owned(),
        ),
    };
    let mut connection = reader.into_inner();
    write!(
        connection,
        "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{text}",
        text.len()
    )
    .unwrap();
}

/// Submits a job, and clears the requests for that.
fn submitted(name: &str) -> (Jobs, Dashboard) {
    launcher();
    let (jobs, dashboard) = (Jobs::new(), Dashboard::new());
    let address = dashboard.address.clone();
    let engine = format!("--engine ray --ray-address {address}");
    jobs.ok(&format!(
        "submit {engine} --name {name} --no-upload -- sh -c true"
    ));
    dashboard.asked();
    (jobs, dashboard)
}

/// Ray was restarted, and another user has taken the name.
#[test]
fn another_users_job_of_the_same_name_is_left_alone() {
    let (jobs, dashboard) = submitted("a");
    jobs.until("get a", "STATUS: PENDING");
    dashboard.replace("a");
    for words in ["logs a", "logs -f a"] {
        let shown = jobs.run(words);
        assert_eq!(shown.stdout, "", "{words:?}");
        assert!(
            shown.stderr.contains("another job of the name a"),
            "{shown:?}"
        );
    }
    jobs.shows("get a", "STATUS: UNKNOWN");
    jobs.shows("stop a", "another job of the name a");
    jobs.ok("stop --forget a");
    let asked = dashboard.asked();
    let reads = |asked: &String| asked == "get /api/jobs/a";
    assert!(asked.iter().all(reads), "{asked:?}");
    assert_eq!(dashboard.jobs.lock().unwrap()["a"]["status"], "RUNNING");
}

#[test]
fn a_job_that_was_stopped_asks_ray_nothing_more() {
    let (jobs, dashboard) = submitted("a");
    assert_eq!(jobs.ok("stop a"), "job a stopped\n");
    let asked = dashboard.asked();
    for wanted in ["post /api/jobs/a/stop", "delete /api/jobs/a"] {
        assert!(asked.iter().any(|asked| asked == wanted), "{asked:?}");
    }
    dashboard.replace("a");
    for words in ["get a", "stop a", "stop --forget a"] {
        jobs.ok(words);
        assert_eq!(dashboard.asked(), [""; 0], "{words:?}");
    }
}

/// The job's own entry is removed, and no other.
#[test]
fn a_job_that_has_ended_by_itself_is_removed_from_ray() {
    for other in [false, true] {
        let (jobs, dashboard) = submitted("a");
        dashboard.set_status("a", "SUCCEEDED");
        jobs.ok("wait a");
        if other {
            dashboard.replace("a");
        }
        jobs.shows("stop a", "had ended as SUCCEEDED");
        assert_eq!(dashboard.jobs.lock().unwrap().contains_key("a"), other);
    }
}

/// A stop was interrupted before Ray had noticed the end.
#[test]
fn what_an_interrupted_stop_has_left_is_removed_by_the_next() {
    let (jobs, dashboard) = submitted("a");
    dashboard.lose("a");
    jobs.ok("stop a");
    assert!(dashboard.jobs.lock().unwrap().is_empty());
}

/// The command that submitted the job was killed before Ray had answered.
#[test]
fn a_job_that_was_half_submitted_is_ended_when_it_is_forgotten() {
    for other in [false, true] {
        let (jobs, dashboard) = submitted("a");
        let path = jobs.folder().join("a/job.json");
        let mut record: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        record["id"] = "".into();
        fs::write(&path, record.to_string()).unwrap();
        if other {
            dashboard.replace("a");
        }
        jobs.refused("stop a", 1, "--forget` ends it, and frees the name");
        assert_eq!(jobs.ok("stop --forget a"), "job a stopped\n");
        assert_eq!(dashboard.jobs.lock().unwrap().contains_key("a"), other);
    }
}
