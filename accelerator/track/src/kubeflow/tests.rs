use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};

use super::*;
use crate::record::{EndStatus, Record};
use crate::run::Run;
use crate::tests::{assert_says, end, entry, start};

const PEM: &[u8] = include_bytes!("fixtures/server.pem");

/// A request to the server: the header with the token, and the body.
struct Asked {
    authorization: String,
    status: Value,
}

/// Starts a server that answers each request with a status until the process ends.
fn server(status: &'static str) -> (String, Receiver<Asked>) {
    let certificate = CertificateDer::from_pem_slice(PEM).unwrap();
    let key = PrivateKeyDer::from_pem_slice(PEM).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    let config = Arc::new(config);
    // The server listens at all of this host's addresses, of which the certificate names one.
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (asked, asks) = channel();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let connection = ServerConnection::new(Arc::clone(&config)).unwrap();
            let mut stream = BufReader::new(StreamOwned::new(connection, stream.unwrap()));
            let (mut authorization, mut length) = (String::new(), 0);
            loop {
                let mut line = String::new();
                // A client that does not trust the certificate disconnects.
                if stream.read_line(&mut line).is_err() || line.trim().is_empty() {
                    break;
                }
                let (name, value) = line.split_once(':').unwrap_or((&line, ""));
                match name.to_ascii_lowercase().as_str() {
                    "authorization" => authorization = value.trim().to_owned(),
                    "content-length" => length = value.trim().parse().unwrap(),
                    _ => {}
                }
            }
            let mut body = vec![0; length];
            if length == 0 || stream.read_exact(&mut body).is_err() {
                continue;
            }
            let status_line = format!(
                "HTTP/1.1 {status}\r\ncontent-length: 18\r\nconnection: close\r\n\r\n{{\"message\":\"said\"}}"
            );
            let status = serde_json::from_slice(&body).unwrap();
            let request = Asked {
                authorization,
                status,
            };
            // First, since the test looks as soon as the client has its answer.
            if asked.send(request).is_err() {
                return;
            }
            let _ = stream.get_mut().write_all(status_line.as_bytes());
            let _ = stream.get_mut().flush();
        }
    });
    (
        format!("https://127.0.0.1:{port}/apis/trainjobs/a/status"),
        asks,
    )
}

/// Returns a folder with the certificate that signs the server's, and a token.
fn files() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(
        folder.path().join("ca.crt"),
        include_str!("fixtures/ca.crt"),
    )
    .unwrap();
    std::fs::write(folder.path().join("token"), "first\n").unwrap();
    folder
}

fn sink(url: &str, folder: &tempfile::TempDir) -> KubeflowSink {
    let at = |name: &str| folder.path().join(name);
    KubeflowSink::new(url, at("ca.crt"), at("token")).unwrap()
}

#[test]
fn the_server_is_told_of_a_run_at_its_end() {
    let (url, asks) = server("200 OK");
    let folder = files();
    let run = Run::builder("mnist")
        .runs_folder(folder.path().join("runs"))
        .hyperparameters(&json!({"lr": 0.1, "epochs": 4}))
        .unwrap()
        .sink(sink(&url, &folder))
        .start()
        .unwrap();
    run.log("train", [("loss", 0.25)], 10, 2.0);
    run.finish().unwrap();

    let last = asks.try_iter().last().unwrap();
    assert_eq!(last.authorization, "Bearer first");
    let told = &last.status["trainerStatus"];
    assert_eq!(told["progressPercentage"], 100);
    assert_eq!(told["estimatedRemainingSeconds"], 0);
    assert_eq!(
        told["metrics"],
        json!([
            {"name": "step", "value": "10"},
            {"name": "epoch", "value": "2"},
            {"name": "train/loss", "value": "0.25"},
        ])
    );
    let time = told["lastUpdatedTime"].as_str().unwrap();
    assert!(humantime::parse_rfc3339(time).is_ok(), "{time}");
}

#[test]
fn requests_are_few_and_each_reads_the_token() {
    let (url, asks) = server("200 OK");
    let folder = files();
    let mut sink = sink(&url, &folder);
    let mut write = |record| {
        let written = sink.write(Origin::Run, &entry(record));
        written.and_then(|()| sink.flush())
    };
    for step in 0..3 {
        write(metrics(step, None)).unwrap();
    }
    assert_eq!(asks.try_iter().count(), 1);

    std::fs::write(folder.path().join("token"), "second").unwrap();
    write(end(EndStatus::Finished)).unwrap();
    let asked: Vec<_> = asks.try_iter().map(|asked| asked.authorization).collect();
    assert_eq!(asked, ["Bearer second"]);
}

#[test]
fn a_server_that_refuses_or_is_another_is_an_error() {
    let folder = files();
    let tell = |url: &str| {
        let mut sink = sink(url, &folder);
        let record = metrics(1, None);
        sink.write(Origin::Run, &entry(record)).unwrap();
        sink.flush().unwrap_err()
    };
    for status in ["403 Forbidden", "404 Not Found", "422 Unprocessable Entity"] {
        let (url, _asks) = server(status);
        let error = tell(&url);
        assert!(error.is_remote() && !error.is_temporary(), "{error}");
        let said = format!("answers with {}: said", &status[..3]);
        assert!(error.to_string().ends_with(&said), "{error}");
    }
    for status in ["503 Service Unavailable", "429 Too Many Requests"] {
        let (url, _asks) = server(status);
        assert!(tell(&url).is_temporary());
    }

    // The certificate is for another address, and then from another authority.
    let (url, asks) = server("200 OK");
    let error = tell(&url.replace("127.0.0.1", "127.0.0.2"));
    assert_says(&error, "certificate not valid for name");
    let other = include_str!("fixtures/other-ca.crt");
    std::fs::write(folder.path().join("ca.crt"), other).unwrap();
    assert_says(&tell(&url), "UnknownIssuer");
    assert_eq!(asks.try_iter().count(), 0);

    std::fs::write(folder.path().join("ca.crt"), "nothing").unwrap();
    let error = agent(&folder.path().join("ca.crt")).unwrap_err();
    assert!(error.is_misuse());
    assert_says(&error, "found none");
    let absent = folder.path().join("none");
    assert!(agent(&absent).unwrap_err().is_not_found());
}

#[test]
fn a_replay_tells_nothing_before_its_end() {
    let (url, asks) = server("200 OK");
    let folder = files();
    let run = start(folder.path(), "mnist");
    for step in 0..5000 {
        run.log("train", [("loss", 0.5)], step, None);
    }
    let path = run.folder().to_owned();
    run.finish().unwrap();
    crate::run::deliver(&path, &mut sink(&url, &folder)).unwrap();
    let told: Vec<_> = asks.try_iter().collect();
    assert_eq!(told.len(), 1);
    assert_eq!(
        told[0].status["trainerStatus"]["metrics"][0]["value"],
        "4999"
    );
}

#[test]
fn a_status_is_within_the_limits_of_the_resource() {
    let mut progress = Progress::default();
    let mut take = |record| progress.take(&entry(record));
    for i in 0..300 {
        take(Record::Series {
            i,
            key: format!("test/{i}"),
        });
    }
    take(Record::Series {
        i: 300,
        key: "a".repeat(65),
    });
    let values = [-1.5e300; 301];
    take(crate::tests::metrics(7, Some(0.1 + 0.2), values));
    // A later test reports an earlier step.
    take(metrics(1, Some(0.0)));
    let status = progress.status();
    let metrics = status["trainerStatus"]["metrics"].as_array().unwrap();
    assert_eq!(metrics.len(), 256);
    let text = |metric: &Value, member: &str| metric[member].as_str().unwrap().to_owned();
    for member in ["name", "value"] {
        let lengths = metrics.iter().map(|metric| text(metric, member).len());
        assert!(lengths.into_iter().all(|length| (1..=64).contains(&length)));
    }
    assert_eq!(
        (text(&metrics[0], "value"), text(&metrics[1], "value")),
        ("7".to_owned(), "0.30000000000000004".to_owned())
    );
}

#[test]
fn the_share_that_is_done_is_that_of_steps_or_epochs() {
    let told = |params: Value, points: &[(u64, Option<f64>, u64)]| {
        let mut progress = Progress::default();
        let set = params.as_object().unwrap().clone().into_iter().collect();
        progress.take(&entry(Record::Param { set }));
        for &(step, epoch, ms) in points {
            progress.take(&Entry {
                n: 0,
                ms,
                record: metrics(step, epoch),
            });
        }
        let status = progress.status()["trainerStatus"].take();
        (
            status["progressPercentage"].as_u64(),
            status["estimatedRemainingSeconds"].as_u64(),
        )
    };
    assert_eq!(told(json!({}), &[(5, Some(1.0), 0)]), (None, None));
    assert_eq!(
        told(json!({"max_steps": 100}), &[(25, None, 0)]),
        (Some(25), None)
    );
    // 25 steps took 10 seconds, and 50 are left.
    assert_eq!(
        told(
            json!({"max_steps": 100}),
            &[(25, None, 1000), (50, None, 11_000)]
        ),
        (Some(50), Some(20))
    );
    // Hugging Face uses -1 for no limit.
    let epochs = json!({"max_steps": -1, "num_train_epochs": 3.0});
    assert_eq!(told(epochs, &[(1, Some(1.5), 0)]), (Some(50), None));
    assert_eq!(
        told(json!({"epochs": 2}), &[(1, Some(2.0), 0)]),
        (Some(99), None)
    );
}

#[test]
fn a_run_that_fails_is_not_done() {
    let mut progress = Progress::default();
    let set = [("max_steps".to_owned(), json!(10))].into();
    progress.take(&entry(Record::Param { set }));
    progress.take(&entry(metrics(10, None)));
    let ended = progress.take(&entry(end(EndStatus::Failed)));
    assert_eq!(ended, Changed::Ended);
    assert_eq!(progress.status()["trainerStatus"]["progressPercentage"], 99);
}

fn metrics(step: u64, epoch: Option<f64>) -> Record {
    crate::tests::metrics(step, epoch, [0.5])
}
