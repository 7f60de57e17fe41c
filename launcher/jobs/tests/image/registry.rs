//! A registry on this machine, and the requests that tests send to it themselves.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

/// A registry, which ends with the test.
pub(crate) struct Registry {
    server: Child,
    address: String,
    folder: TempDir,
}

/// A containerd with folders of its own, which ends with the test.
pub(crate) struct Containerd {
    server: Child,
    folder: TempDir,
}

const START: Duration = Duration::from_secs(30);

impl Registry {
    /// Starts a registry on a free port. If `users` has lines of htpasswd, it requires their passwords. Returns `None`
    /// if this machine has no registry.
    pub(crate) fn start(users: &str) -> Option<Self> {
        if !is_there("docker-registry", "docker-registry") {
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let address = format!("127.0.0.1:{}", crate::ports::free_port());
        let path = |name: &str| folder.path().join(name).display().to_string();
        fs::write(path("users"), users).unwrap();
        let auth = match users {
            "" => Value::Null,
            _ => json!({ "htpasswd": { "realm": "test", "path": path("users") } }),
        };
        let mut config = json!({
            "version": 0.1,
            "log": { "accesslog": { "disabled": false } },
            "storage": { "filesystem": { "rootdirectory": path("data") } },
            "http": { "addr": address },
        });
        if !auth.is_null() {
            config["auth"] = auth;
        }
        fs::write(path("config.yml"), config.to_string()).unwrap();
        let log = File::create(path("log")).unwrap();
        let server = Command::new("docker-registry")
            .args(["serve", &path("config.yml")])
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        wait_for("docker-registry", || TcpStream::connect(&address).is_ok());
        Some(Self {
            server,
            address,
            folder,
        })
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    pub(crate) fn reference(&self, name: &str) -> String {
        format!("{}/{name}", self.address)
    }

    pub(crate) fn manifest(&self, repository: &str, reference: &str) -> Value {
        serde_json::from_slice(&self.raw_manifest(repository, reference)).unwrap()
    }

    pub(crate) fn raw_manifest(&self, repository: &str, reference: &str) -> Vec<u8> {
        let accept = "Accept: application/vnd.oci.image.manifest.v1+json";
        let path = format!("/v2/{repository}/manifests/{reference}");
        http(&self.address, &format!("GET {path}"), &[accept], b"")
    }

    pub(crate) fn blob(&self, repository: &str, digest: &str) -> Vec<u8> {
        let path = format!("/v2/{repository}/blobs/{digest}");
        http(&self.address, &format!("GET {path}"), &[], b"")
    }

    /// Puts an image that the registry has into an index of its own.
    pub(crate) fn push_index(&self, name: &str, tag: &str, architecture: &str, manifest: &[u8]) {
        let digits: String = <sha2::Sha256 as sha2::Digest>::digest(manifest)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let kind = "application/vnd.oci.image.index.v1+json";
        let index = json!({
            "schemaVersion": 2,
            "mediaType": kind,
            "manifests": [{
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "digest": format!("sha256:{digits}"),
                "size": manifest.len(),
                "platform": { "os": "linux", "architecture": architecture },
            }],
        });
        let put = format!("PUT /v2/{name}/manifests/{tag}");
        let kind = format!("Content-Type: {kind}");
        http(&self.address, &put, &[&kind], index.to_string().as_bytes());
    }

    /// Returns the registry's log.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap()
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        end(&mut self.server);
    }
}

impl Containerd {
    pub(crate) fn ctr(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new("ctr");
        command
            .arg("--address")
            .arg(self.folder.path().join("socket"));
        command.args(arguments).output().unwrap()
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        end(&mut self.server);
    }
}

/// Starts a containerd. Returns `None` if this machine has none, or if this user may not start it.
pub(crate) fn containerd() -> Option<Containerd> {
    if !is_there("containerd", "containerd") {
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let config = format!(
        "version = 2\nroot = '{}'\nstate = '{}'\ndisabled_plugins = ['io.containerd.grpc.v1.cri', 'io.containerd.internal.v1.opt']\n\
         [grpc]\naddress = '{}'\n[ttrpc]\naddress = '{}'\n",
        path("root"),
        path("state"),
        path("socket"),
        path("ttrpc")
    );
    fs::write(path("config.toml"), config).unwrap();
    let log = File::create(path("log")).unwrap();
    let server = Command::new("containerd")
        .args(["--config", &path("config.toml")])
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap();
    let containerd = Containerd { server, folder };
    wait_for("containerd", || {
        containerd.ctr(&["version"]).status.success()
    });
    Some(containerd)
}

/// Starts a server that admits everyone, has no blob, and gives this answer to all other requests. It ends with the
/// tests.
pub(crate) fn answer_with(status: &'static str, body: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = [0; 4096];
            let length = stream.read(&mut request).unwrap_or(0);
            let (status, body) = match &request[..length] {
                request if request.starts_with(b"GET /v2/ ") => ("200 OK", "{}"),
                request if request.starts_with(b"HEAD ") => ("404 Not Found", ""),
                _ => (status, body),
            };
            let length = body.len();
            let head = format!(
                "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
            );
            let _ = stream.write_all(format!("{head}{body}").as_bytes());
        }
    });
    address
}

/// Returns the body of an answer, which must report success.
fn http(address: &str, request: &str, headers: &[&str], body: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(START)).unwrap();
    // With HTTP 1.0, the answer has no chunks.
    let mut head = format!("{request} HTTP/1.0\r\nHost: {address}\r\n");
    for header in headers {
        head.push_str(&format!("{header}\r\n"));
    }
    head.push_str(&format!("Content-Length: {}\r\n\r\n", body.len()));
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let end = answer
        .windows(4)
        .position(|bytes| bytes == b"\r\n\r\n")
        .unwrap();
    let head = String::from_utf8_lossy(&answer[..end]).into_owned();
    assert!(
        head.starts_with("HTTP/1.0 20") || head.starts_with("HTTP/1.1 20"),
        "{request}: {head}"
    );
    answer.split_off(end + 4)
}

fn is_there(program: &str, package: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_there = std::env::split_paths(&path).any(|folder| folder.join(program).is_file());
    if !is_there {
        let required =
            std::env::var_os("ENGINE_TESTS_REQUIRE").is_some_and(|value| !value.is_empty());
        assert!(
            !required,
            "{program} is required and not there; install Debian's package {package}"
        );
        eprintln!("SKIPPED: {program} is not there; install Debian's package {package}");
    }
    is_there
}

fn wait_for(server: &str, is_up: impl Fn() -> bool) {
    let deadline = Instant::now() + START;
    while !is_up() {
        assert!(Instant::now() < deadline, "{server} does not come up");
        thread::sleep(Duration::from_millis(50));
    }
}

fn end(server: &mut Child) {
    let _ = server.kill();
    let _ = server.wait();
}
