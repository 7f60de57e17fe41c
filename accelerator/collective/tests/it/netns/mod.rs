//! Hosts on one machine: network namespaces joined by a switch.

use std::{
    env,
    fs::{self, OpenOptions},
    io::{BufRead, BufReader, Write},
    os::unix::fs::OpenOptionsExt,
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc::{self, Receiver},
    },
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

/// Hosts that reach each other over their own links. Dropping it removes it and its ranks.
pub(crate) struct Network {
    name: String,
    hosts: usize,
    folder: TempDir,
}

impl Network {
    /// Creates a network of `hosts` hosts. Prints a line and returns `None` if the system does not allow it.
    pub(crate) fn new(hosts: usize) -> Option<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        sweep();
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let network = Self {
            name: format!("{PREFIX}{}-{count}", std::process::id()),
            hosts,
            folder: tempfile::tempdir().unwrap(),
        };
        match network.build() {
            Ok(()) => Some(network),
            Err(why) => {
                eprintln!("skipped: network namespaces cannot be made here: {why}");
                None
            }
        }
    }

    fn build(&self) -> Result<(), String> {
        let mut token = OpenOptions::new();
        let token = token
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(self.token());
        writeln!(token.unwrap(), "a token of sixteen bytes and more").unwrap();
        let switch = self.space("switch");
        ip(&["netns", "add", &switch])?;
        ip(&["-n", &switch, "link", "add", "switch", "type", "bridge"])?;
        ip(&["-n", &switch, "link", "set", "switch", "up"])?;
        for host in 0..self.hosts {
            let (space, port) = (self.host(host), format!("port{host}"));
            let address = format!("10.77.0.{}/24", host + 1);
            ip(&["netns", "add", &space])?;
            ip(&["-n", &space, "link", "set", "lo", "up"])?;
            ip(&[
                "link", "add", "eth0", "netns", &space, "type", "veth", "peer", "name", &port,
                "netns", &switch,
            ])?;
            ip(&["-n", &space, "address", "add", &address, "dev", "eth0"])?;
            ip(&["-n", &space, "link", "set", "eth0", "up"])?;
            ip(&[
                "-n", &switch, "link", "set", &port, "master", "switch", "up",
            ])?;
        }
        Ok(())
    }

    /// Names the hosts `node-0` and so on. Each resolves its own name to a loopback address, as on Debian.
    pub(crate) fn name_hosts(&self, loopback: &str) {
        for own in 0..self.hosts {
            let mut table = "127.0.0.1 localhost\n".to_owned();
            for host in 0..self.hosts {
                let address = match host == own {
                    true => loopback.to_owned(),
                    false => format!("10.77.0.{}", host + 1),
                };
                table.push_str(&format!("{address} node-{host}\n"));
            }
            // `ip netns exec` mounts it over the machine's file.
            let folder = of_space(&self.host(own));
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("hosts"), table).unwrap();
        }
    }

    /// Sets a kernel parameter of a host, named by its path below `/proc/sys`.
    pub(crate) fn set(&self, host: usize, name: &str, value: &str) {
        let write = format!("echo {value} > /proc/sys/{name}");
        let host = self.host(host);
        ip(&["netns", "exec", &host, "sh", "-c", &write]).unwrap();
    }

    /// Unplugs the cable of a host.
    pub(crate) fn cut(&self, host: usize) {
        let (switch, port) = (self.space("switch"), format!("port{host}"));
        ip(&["-n", &switch, "link", "set", &port, "down"]).unwrap();
    }

    /// Returns the bytes that a host has sent over its link.
    pub(crate) fn sent(&self, host: usize) -> u64 {
        let output = Command::new("ip")
            .args(["netns", "exec", &self.host(host), "cat"])
            .arg("/sys/class/net/eth0/statistics/tx_bytes")
            .output()
            .unwrap();
        String::from_utf8(output.stdout)
            .unwrap()
            .trim()
            .parse()
            .unwrap()
    }

    /// Returns the file of a job token.
    pub(crate) fn token(&self) -> PathBuf {
        self.folder.path().join("token")
    }

    /// Starts this test's executable as a rank, which runs the test `networks::a_rank`. Each host holds the same number
    /// of ranks, in order.
    pub(crate) fn start(
        &self,
        rank: usize,
        ranks_per_host: usize,
        variables: &[(&str, &str)],
    ) -> Rank {
        let host = self.host(rank / ranks_per_host);
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &host])
            .arg(env::current_exe().unwrap())
            .args([
                "networks::a_rank",
                "--exact",
                "--nocapture",
                "--test-threads=1",
            ])
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", (self.hosts * ranks_per_host).to_string())
            .env("LOCAL_RANK", (rank % ranks_per_host).to_string())
            .env("LOCAL_WORLD_SIZE", ranks_per_host.to_string())
            .env("MASTER_ADDR", "10.77.0.1")
            // Every network has its own ports.
            .env("ACCEL_PORT", "29500")
            .env("ACCEL_LIVENESS_TIMEOUT", "1")
            .envs(variables.iter().copied())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                // The test may have stopped listening.
                let _ = sender.send(line);
            }
        });
        Rank {
            child,
            lines,
            until: Instant::now() + Duration::from_secs(90),
        }
    }

    fn host(&self, host: usize) -> String {
        self.space(&host.to_string())
    }

    fn space(&self, part: &str) -> String {
        format!("{}-{part}", self.name)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for host in 0..self.hosts {
            delete(&self.host(host));
        }
        delete(&self.space("switch"));
    }
}

/// A process that is a rank.
pub(crate) struct Rank {
    child: Child,
    lines: Receiver<String>,
    until: Instant,
}

impl Rank {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line of this name and returns its fields.
    pub(crate) fn line(&mut self, name: &str) -> Vec<String> {
        let left = || self.until.saturating_duration_since(Instant::now());
        while let Ok(line) = self.lines.recv_timeout(left()) {
            let mut fields = line.split('\t').map(str::to_owned);
            if fields.next().as_deref() == Some(name) {
                return fields.collect();
            }
        }
        let _ = self.child.kill();
        let mut stderr = self.child.stderr.take().unwrap();
        let text = std::io::read_to_string(&mut stderr).unwrap_or_default();
        panic!("the rank does not say {name:?}: {text}");
    }

    pub(crate) fn end(mut self) -> ExitStatus {
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < self.until, "a rank does not end");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Removes the leftovers of tests that were killed.
fn sweep() {
    let Ok(list) = ip(&["netns", "list"]) else {
        return;
    };
    for name in list.lines().filter_map(|line| line.split(' ').next()) {
        let owner = name.strip_prefix(PREFIX).and_then(|x| x.split('-').next());
        let owner = owner.and_then(|x| x.parse::<u32>().ok());
        if owner.is_some_and(|pid| !PathBuf::from(format!("/proc/{pid}")).exists()) {
            delete(name);
        }
    }
}

fn delete(space: &str) {
    let _ = ip(&["netns", "del", space]);
    let _ = fs::remove_dir_all(of_space(space));
}

/// Returns the folder of files that a namespace sees in place of those in `/etc`.
fn of_space(space: &str) -> PathBuf {
    PathBuf::from("/etc/netns").join(space)
}

fn ip(arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("ip").args(arguments).output();
    let output = output.map_err(|error| format!("there is no `ip`: {error}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!(
            "`ip {}`: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        )),
    }
}

const PREFIX: &str = "accel-test-";
