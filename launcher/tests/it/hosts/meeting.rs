//! Hosts that find each other, and hosts that do not.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use super::{Hosts, end};
use crate::ports::free_port;
use crate::support::{Folder, Run, join_group, test_as_program, wait_until};
use accelerator_collective::ReduceOp;
use accelerator_collective::internal::Token;

/// The variable with the name of the file to which each rank adds its sum.
const RANK_OUTPUT: &str = "LAUNCHER_TEST_HOSTS";

#[test]
fn ranks_of_three_hosts_meet() -> accelerator_collective::Result<()> {
    if let Some(path) = std::env::var_os(RANK_OUTPUT) {
        let group = join_group()?;
        let mut values = [1.0_f64, group.rank() as f64];
        group.all_reduce(&mut values, ReduceOp::Sum)?;
        let path = std::path::Path::new(&path).with_extension(group.rank().to_string());
        std::fs::write(path, format!("{values:?} {}", group.topology())).ok();
        return group.close();
    }
    // The first is an address of host 0 itself. For the second, a name, it listens at all addresses.
    for address in ["127.0.0.2", "localhost"] {
        check_that_ranks_meet(address);
    }
    // The test needs IPv6.
    if TcpListener::bind("[::1]:0").is_ok() {
        check_that_ranks_meet("[::1]");
    }
    Ok(())
}

fn check_that_ranks_meet(address: &'static str) {
    let hosts = Hosts {
        address,
        ..Hosts::new(3)
    };
    let program = test_as_program("hosts::meeting::ranks_of_three_hosts_meet");
    let runs = [2, 1, 1].into_iter().enumerate().map(|(host, ranks)| {
        let line = format!("--nproc-per-node {ranks} {program}");
        let mut command = hosts.command(host, &line);
        command.env(RANK_OUTPUT, hosts.folder.path().join("sum"));
        Run::start(command)
    });
    let ended = end(runs, &[0, 0, 0]);
    for (rank, local) in ["0 of 2", "1 of 2", "0 of 1", "0 of 1"].iter().enumerate() {
        assert_eq!(
            hosts.folder.read(&format!("sum.{rank}")),
            format!("[4.0, 6.0] rank {rank} of 4 (local {local})"),
            "{ended:?}"
        );
    }
}

#[test]
fn a_rank_that_finds_no_network_interface_of_the_name_ends_the_job_and_says_so() {
    if std::env::var_os(RANK_OUTPUT).is_some() {
        let error = join_group().unwrap_err().to_string();
        eprintln!("{error}");
        std::process::exit(i32::from(error.contains("eth99,ib99")) * 7);
    }
    let hosts = Hosts::new(2);
    let program = test_as_program(
        "hosts::meeting::a_rank_that_finds_no_network_interface_of_the_name_ends_the_job_and_says_so",
    );
    let runs = [("lo", 0), ("eth99,ib99", 1)].map(|(interface, host)| {
        let mut command =
            hosts.command(host, &format!("--network-interface {interface} {program}"));
        command.env(RANK_OUTPUT, "");
        Run::start(command)
    });
    let ended = end(runs, &[7, 7]);
    assert!(
        ended[0].stderr.contains(
            "ACCEL_NETWORK_INTERFACE is \"eth99,ib99\": this host has no such network interface; it has "
        ),
        "{ended:?}"
    );
}

#[test]
fn every_rank_knows_its_place_and_host_0_shows_what_all_write() {
    let hosts = Hosts::new(3);
    hosts.folder.script(
        "show.sh",
        "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $ACCEL_STORE; \
         echo $MASTER_ADDR:$MASTER_PORT $ACCEL_JOB >> where; echo error $RANK >&2",
    );
    let ranks = ["1", "3", "2"];
    let runs = ranks.iter().enumerate().map(|(host, ranks)| {
        let line = format!("--nproc-per-node {ranks} --log-dir logs show.sh");
        hosts.start(host, &line)
    });
    let ended = end(runs, &[0, 0, 0]);
    assert_eq!(
        ended[0].sorted(),
        [
            "[0] 0 6 0 1 0 3 launcher",
            "[1] 1 6 0 3 1 3 launcher",
            "[2] 2 6 1 3 1 3 launcher",
            "[3] 3 6 2 3 1 3 launcher",
            "[4] 4 6 0 2 2 3 launcher",
            "[5] 5 6 1 2 2 3 launcher",
        ]
    );
    for rank in 0..6 {
        let line = format!("[{rank}] error {rank}\n");
        assert!(ended[0].stderr.contains(&line), "{:?}", ended[0]);
    }
    for other in &ended[1..] {
        assert!(
            other.stdout.is_empty() && !other.stderr.contains("error"),
            "{other:?}"
        );
    }
    let mut places = hosts.folder.wait_for_lines("where", 6);
    places.dedup();
    assert_eq!(places.len(), 1, "one store and one job: {places:?}");
    assert!(places[0].starts_with("127.0.0.1:"), "{places:?}");
    // The logs are those of host 0.
    assert!(
        hosts
            .folder
            .read("logs/latest/rank-5.log")
            .contains("error 5")
    );
}

#[test]
fn accelerates_options_and_addresses_of_node_0_are_understood() {
    let hosts = Hosts::new(2);
    hosts.folder.script("show.sh", "echo $RANK $WORLD_SIZE");
    let runs = (0..2).map(|host| {
        let mut command = hosts.folder.command(&format!(
            "--num_machines 2 --machine_rank {host} --main_process_ip localhost \
             --main_process_port {} --nproc_per_node=1 show.sh",
            hosts.port
        ));
        command.env("ACCEL_INSECURE", "1");
        Run::start(command)
    });
    let ended = end(runs, &[0, 0]);
    assert_eq!(ended[0].sorted(), ["[0] 0 2", "[1] 1 2"]);
}

#[test]
fn hosts_with_different_tokens_do_not_meet_and_both_say_why() {
    let hosts = Hosts::new(2);
    hosts.folder.script("ran.sh", "echo ran >> ran");
    let other = hosts.folder.path().join("other");
    Token::generate().unwrap().write_file(&other).unwrap();
    let head = hosts.start(0, "--join-timeout 5 ran.sh");
    for (variable, value, says) in [
        (
            "ACCEL_TOKEN_FILE",
            other.to_str().unwrap(),
            "different tokens",
        ),
        ("ACCEL_INSECURE", "1", "the other one does without"),
    ] {
        let mut command = hosts.command(1, "ran.sh");
        command.env_remove("ACCEL_TOKEN_FILE").env(variable, value);
        Run::start(command).end().expect(2).says(says);
    }
    let ended = head.end().expect(1).says("host 1 did not join within 5 s");
    let ended = ended.says("refused 127.0.0.1: ").says("different tokens");
    ended.says("the other one does without");
    assert_eq!(hosts.folder.read("ran"), "");
}

#[test]
fn several_hosts_need_a_token_or_the_word_that_they_do_without() {
    let hosts = Hosts::new(2);
    hosts.folder.script("ran.sh", "echo ran >> ran");
    for host in 0..2 {
        let mut command = hosts.command(host, "ran.sh");
        command.env_remove("ACCEL_TOKEN_FILE");
        let ended = Run::start(command).end().expect(2);
        ended.says("ACCEL_TOKEN_FILE").says("ACCEL_INSECURE=1");
    }
    assert_eq!(hosts.folder.read("ran"), "");
}

#[test]
fn two_launchers_with_one_place_are_an_error_everywhere() {
    let hosts = Hosts::new(3);
    hosts.folder.script("ran.sh", "echo ran >> ran");
    let runs = [0, 1, 1].map(|host| hosts.start(host, "ran.sh"));
    for ended in end(runs, &[2, 2, 2]) {
        ended.says("two launchers are host 1").says("--node-rank");
    }
    assert_eq!(hosts.folder.read("ran"), "");
}

#[test]
fn one_launcher_too_many_is_refused_and_the_job_continues() {
    let hosts = Hosts::new(2);
    hosts.folder.script(
        "job.sh",
        "touch started.$RANK; while [ ! -e go ]; do sleep 0.02; done",
    );
    let runs = hosts.start_all("job.sh");
    wait_until("both ranks", || {
        let started = |rank| hosts.folder.path().join(format!("started.{rank}")).exists();
        (started(0) && started(1)).then_some(())
    });
    let third = hosts.start(1, "job.sh").end();
    third.expect(2).says("two launchers are host 1");
    let more = Hosts {
        port: hosts.port,
        token: hosts.token.clone(),
        ..Hosts::new(3)
    };
    more.folder.script("job.sh", "exit 0");
    let third = more.start(2, "job.sh").end();
    third
        .expect(2)
        .says("--nnodes 3, and host 0 with --nnodes 2");
    hosts.folder.write("go", "");
    let ended = end(runs, &[0, 0]);
    assert!(
        ended[0].stderr.contains("refused 127.0.0.1: two launchers"),
        "{ended:?}"
    );
}

#[test]
fn hosts_that_disagree_on_their_number_are_an_error_everywhere() {
    let hosts = Hosts::new(2);
    hosts.folder.script("ran.sh", "echo ran >> ran");
    let head = hosts.start(0, "ran.sh");
    let others = Hosts {
        port: hosts.port,
        token: hosts.token.clone(),
        ..Hosts::new(3)
    };
    others.folder.script("ran.sh", "exit 0");
    for run in [others.start(1, "ran.sh"), head] {
        let ended = run.end().expect(2);
        ended.says("host 1 was started with --nnodes 3, and host 0 with --nnodes 2");
    }
    assert_eq!(hosts.folder.read("ran"), "");
}

#[test]
fn restarts_that_another_host_asks_for_do_not_count() {
    let hosts = Hosts::new(2);
    hosts.folder.script("show.sh", "echo $ACCEL_MAX_RESTARTS");
    let head = hosts.start(0, "--max-restarts 2 show.sh");
    let other = hosts.start(1, "--max-restarts 7 show.sh");
    other.end().expect(0);
    let ended = head.end().expect(0);
    assert_eq!(ended.sorted(), ["[0] 2", "[1] 2"]);
    ended.says("--max-restarts 7; what counts is the 2 of host 0");
}

/// There are more idle connections than host 0 admits at once.
#[test]
fn idle_connections_keep_no_host_out() {
    let hosts = Hosts::new(2);
    hosts.folder.script("show.sh", "echo $RANK");
    let head = hosts.start(0, "show.sh");
    let connect = || TcpStream::connect(("127.0.0.1", hosts.port)).ok();
    let first = wait_until("the head", connect);
    let idle: Vec<_> = (0..300).filter_map(|_| connect()).collect();
    assert_eq!(idle.len(), 300);
    let other = hosts.start(1, "show.sh");
    let ended = end([head, other], &[0, 0]);
    let line = "256 connections at once have not proved who they are";
    assert_eq!(ended[0].stderr.matches(line).count(), 1, "{ended:?}");
    drop((first, idle));
}

/// Here, IPv6 sockets accept no IPv4 connection, and sockets can bind addresses of other hosts.
#[test]
fn hosts_meet_whatever_the_defaults_of_the_system_for_sockets_are() {
    let folder = Folder::new();
    let launcher = folder.launcher();
    folder.script("show.sh", "echo $RANK");
    folder.script(
        "both.sh",
        "set -e
        echo 1 > /proc/sys/net/ipv6/bindv6only; echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind
        cat /proc/sys/net/ipv6/bindv6only > bindv6only
        ip link set lo up; ip address add 192.0.2.7/32 dev lo
        for listed in 192.0.2.7 192.0.2.8; do \"$LAUNCHER\" --hosts $listed,u@b --dry-run show.sh > $listed; done
        for host in 0 1; do
            \"$LAUNCHER\" --nnodes 2 --node-rank $host --rdzv-endpoint $([ $host = 0 ] && echo localhost || echo 127.0.0.1) \
                --join-timeout 20 show.sh > out.$host 2> error.$host &
        done
        wait; echo done > done",
    );
    let mut command = std::process::Command::new("unshare");
    command
        .args(["--net", "--", "sh", "both.sh"])
        .current_dir(folder.path())
        .env("LAUNCHER", launcher.get_program())
        .env("ACCEL_INSECURE", "1");
    let output = command.output().unwrap();
    if folder.read("bindv6only").is_empty() {
        eprintln!("skipped: no namespace of networks can be made here: {output:?}");
        return;
    }
    assert_eq!(folder.read("bindv6only").trim(), "1");
    assert_eq!(folder.read("done").trim(), "done", "{output:?}");
    let shown = ["out.0", "error.0", "error.1"].map(|name| folder.read(name));
    let mut lines: Vec<_> = shown[0].lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0] 0", "[1] 1"], "{shown:?}");
    for (listed, is_own) in [("192.0.2.7", true), ("192.0.2.8", false)] {
        let plan = folder.read(listed);
        assert_eq!(plan.contains("this host"), is_own, "{listed}: {plan}");
    }
}

#[test]
fn a_host_that_does_not_come_is_named() {
    let hosts = Hosts::new(3);
    hosts.folder.script("ran.sh", "echo ran >> ran");
    let other = hosts.start(2, "ran.sh");
    // Host 2 has the same time to join, on a busy machine too.
    let head = hosts.start(0, "--join-timeout 6.5 ran.sh");
    let says = format!(
        "host 1 did not join within 6.5 s: start accel-launch there with `--nnodes 3 --node-rank 1 --rdzv-endpoint \
         127.0.0.1:{}`",
        hosts.port
    );
    let ended = [head, other].map(|run| run.end().expect(1));
    assert!(ended[0].took < Duration::from_secs(20), "{ended:?}");
    for ended in ended {
        ended.says(&says);
    }
    assert_eq!(hosts.folder.read("ran"), "");
}

#[test]
fn a_head_that_is_not_there_is_waited_for_and_then_named() {
    let hosts = Hosts::new(2);
    hosts.folder.script("show.sh", "echo $RANK");
    let ended = hosts.start(1, "--join-timeout 1 show.sh").end();
    let ended = ended.expect(1).says("was not reached at 127.0.0.1:");
    assert!(ended.took < Duration::from_secs(20), "{ended:?}");
    // The head starts later than the other.
    let other = hosts.start(1, "show.sh");
    std::thread::sleep(Duration::from_millis(700));
    let head = hosts.start(0, "show.sh");
    end([head, other], &[0, 0]);
}

#[test]
fn what_listens_in_the_place_of_the_head_is_recognised() {
    let hosts = Hosts::new(2);
    hosts.folder.script("show.sh", "echo $RANK");
    let listener = TcpListener::bind(("127.0.0.1", hosts.port)).unwrap();
    // The listener accepts the connection and sends nothing.
    let ended = hosts.start(1, "--join-timeout 1 show.sh").end();
    ended.expect(1).says("it did not answer in time");
    let server = std::thread::spawn(move || {
        // Earlier connections are still in the queue.
        for connection in listener.incoming() {
            let mut connection = connection.unwrap();
            let _ = connection.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
            let mut byte = [0];
            if connection.read(&mut byte).is_ok_and(|count| count > 0) && byte[0] == b'!' {
                return;
            }
        }
    });
    let ended = hosts.start(1, "show.sh").end();
    ended
        .expect(2)
        .says("what answers there is no accel-launch");
    let mut last = TcpStream::connect(("127.0.0.1", hosts.port)).unwrap();
    last.write_all(b"!").unwrap();
    server.join().unwrap();
}

#[test]
fn strangers_do_not_disturb_the_head() {
    let hosts = Hosts::new(2);
    hosts.folder.script("show.sh", "echo $RANK");
    let head = hosts.start(0, "show.sh");
    let connect = || TcpStream::connect(("127.0.0.1", hosts.port)).ok();
    let mut garbage = wait_until("the head to listen", connect);
    garbage
        .write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        .unwrap();
    let silent = connect().unwrap();
    let mut newer = connect().unwrap();
    newer.write_all(b"accel-hs").unwrap();
    let nonce = vec!["0"; 32].join(",");
    let hello = format!(
        "{{\"protocol\":99,\"version\":\"9.9.9\",\"nonce\":[{nonce}],\"proves_token\":true}}"
    );
    newer
        .write_all(&(hello.len() as u32).to_le_bytes())
        .unwrap();
    newer.write_all(hello.as_bytes()).unwrap();
    let mut answer = Vec::new();
    newer.read_to_end(&mut answer).unwrap();
    let answer = String::from_utf8_lossy(&answer).into_owned();
    // This field shows the other side that the versions do not match.
    let own = format!("\"version\":\"{}\"", env!("CARGO_PKG_VERSION"));
    assert!(answer.contains(&own), "{answer}");
    hosts.start(1, "show.sh").end().expect(0);
    drop((garbage, silent));
    let ended = head
        .end()
        .expect(0)
        .says("it runs accel-launch 9.9.9 (protocol 99)");
    ended.says("what answers there is no accel-launch");
}

#[test]
fn a_port_that_is_taken_is_an_error_before_anything_starts() {
    let hosts = Hosts::new(2);
    hosts.folder.script("ran.sh", "echo ran >> ran");
    let _listener = TcpListener::bind(("127.0.0.1", hosts.port)).unwrap();
    let ended = hosts.start(0, "ran.sh").end().expect(1);
    ended.says(&format!("port {} is taken", hosts.port));
    assert_eq!(hosts.folder.read("ran"), "");
}

#[test]
fn a_port_of_the_store_can_be_chosen() {
    let hosts = Hosts::new(2);
    hosts.folder.script("show.sh", "echo $MASTER_PORT");
    let port = free_port().to_string();
    let ended = end(
        hosts.start_all(&format!("--master-port {port} show.sh")),
        &[0, 0],
    );
    assert_eq!(
        ended[0].sorted(),
        [format!("[0] {port}"), format!("[1] {port}")]
    );
}

#[test]
fn on_one_host_both_numbers_of_ranks_are_the_same() {
    let folder = Folder::new();
    folder.script(
        "show.sh",
        "echo $RANK $WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE",
    );
    for options in [
        "--num-processes 2",
        "--nproc-per-node 2",
        "--nproc_per_node=2 --nnodes=1 --node_rank=0",
        "--nnodes 1:1 --rdzv-endpoint localhost:0 --nproc-per-node 2",
    ] {
        let ended = folder.launch(&format!("{options} show.sh")).expect(0);
        assert_eq!(ended.sorted(), ["[0] 0 2 0 1", "[1] 1 2 0 1"], "{options}");
    }
    let ended = folder.launch("--nproc-per-node cpu show.sh").expect(0);
    let cores = std::thread::available_parallelism().unwrap().get();
    assert_eq!(ended.text().lines().count(), cores);
}

#[test]
fn a_dry_run_shows_the_hosts() {
    let hosts = Hosts::new(2);
    hosts.folder.script("ran.sh", "echo ran >> ran");
    for host in 0..2 {
        let run = hosts.start(host, "--nproc-per-node 2 --dry-run ran.sh");
        run.end()
            .expect(0)
            .shows("processes 2 --nproc-per-node")
            .shows("hosts 2 --nnodes")
            .shows(&format!("this host {host} --node-rank"))
            .shows(&format!(
                "host 0 listens at 127.0.0.1:{} --rdzv-endpoint",
                hosts.port
            ));
    }
    assert_eq!(hosts.folder.read("ran"), "");
}
