//! Ends of jobs on several hosts, which are the same on all of them.

use std::fs::File;
use std::process::Stdio;
use std::time::Duration;

use super::{Hosts, end};
use crate::support::{LONG_SLEEP, Run, is_alive, wait_until_dead};
use rustix::process::Signal;

#[test]
fn a_rank_that_fails_is_named_on_all_hosts_and_its_code_is_theirs() {
    let hosts = Hosts::new(3);
    hosts.folder.script(
        "fail.sh",
        &format!(
            "echo $$ >> pids; while [ $(wc -l < pids) -lt 5 ]; do sleep 0.05; done\n\
             [ $RANK = 2 ] && {{ echo the reason >&2; exit 7; }}; {LONG_SLEEP}"
        ),
    );
    let ranks = ["2", "1", "2"];
    let runs = ranks.iter().enumerate().map(|(host, ranks)| {
        let line = format!("--nproc-per-node {ranks} --log-dir logs fail.sh");
        hosts.start(host, &line)
    });
    let ended = end(runs, &[7, 7, 7]);
    let report = hosts.folder.failure();
    assert_eq!(
        (&report["first"]["rank"], &report["first"]["node"]),
        (&2.into(), &1.into())
    );
    assert_eq!(report["world_size"], 5);
    assert_eq!(report["first"]["last_words"][0], "the reason");
    let [head, others @ ..] = ended.as_slice() else {
        panic!("{ended:?}")
    };
    let failed = "failed first: exit code 7";
    assert!(
        head.stderr.contains(failed) && head.stderr.contains("    | the reason"),
        "{head:?}"
    );
    assert!(
        head.stderr.contains("rank 2 (pid ") && head.stderr.contains(" on "),
        "{head:?}"
    );
    for other in others {
        let says = "the job ended with exit code 7: rank 2 (pid ";
        assert!(
            other.stderr.contains(says) && other.stderr.contains(failed),
            "{other:?}"
        );
    }
    for pid in hosts.folder.wait_for_lines("pids", 5) {
        assert!(!is_alive(&pid));
    }
}

#[test]
fn a_signal_to_any_launcher_ends_the_job_on_all_hosts() {
    for asked in 0..2 {
        let hosts = Hosts::new(2);
        hosts.folder.script(
            "job.sh",
            &format!("trap 'echo INT >> got; exit 0' INT; echo $$ >> pids; {LONG_SLEEP} & wait"),
        );
        let runs = hosts.start_all("--nproc-per-node 2 job.sh");
        let pids = hosts.folder.wait_for_lines("pids", 4);
        // A signal while ranks are being started kills them, and host 0 may not know yet that all run.
        std::thread::sleep(Duration::from_millis(500));
        runs[asked].signal(Signal::INT);
        let ended = end(runs, &[130, 130]);
        assert!(ended[0].stderr.contains("ended by SIGINT"), "{ended:?}");
        // Each rank gets the signal once.
        assert_eq!(hosts.folder.read("got"), "INT\n".repeat(4));
        pids.iter().for_each(|pid| wait_until_dead(pid));
    }
}

#[test]
fn a_signal_to_all_launchers_is_one_request() {
    let hosts = Hosts::new(3);
    // A signal that counted twice would kill the ranks before they are done.
    hosts.folder.script(
        "job.sh",
        "trap 'sleep 1; echo done >> got; exit 0' TERM; echo $$ >> pids; while :; do sleep 0.1; done",
    );
    let runs = hosts.start_all("--grace 60 job.sh");
    hosts.folder.wait_for_lines("pids", 3);
    for run in runs.iter().rev() {
        run.signal(Signal::TERM);
        std::thread::sleep(Duration::from_millis(150));
    }
    end(runs, &[143, 143, 143]);
    assert_eq!(hosts.folder.read("got"), "done\n".repeat(3));
}

#[test]
fn a_second_signal_to_another_host_kills() {
    let hosts = Hosts::new(2);
    hosts.folder.script(
        "job.sh",
        "trap 'echo x >> got' INT; echo $$ >> pids; i=0; while [ $i -lt 3000 ]; do sleep 0.1; i=$((i + 1)); done",
    );
    let runs = hosts.start_all("--grace 1000 job.sh");
    let pids = hosts.folder.wait_for_lines("pids", 2);
    runs[1].signal(Signal::INT);
    hosts.folder.wait_for_lines("got", 2);
    runs[1].signal(Signal::TERM);
    end(runs, &[130, 130]);
    pids.iter().for_each(|pid| wait_until_dead(pid));
}

#[test]
fn a_signal_ends_the_wait_for_other_hosts() {
    let hosts = Hosts::new(3);
    hosts.folder.script("job.sh", "exit 0");
    let alone = hosts.start(1, "job.sh");
    alone.wait_until_it_handles(Signal::TERM);
    alone.signal(Signal::TERM);
    alone.end().expect(143);
    let runs = [0, 2].map(|host| hosts.start(host, "--join-timeout 60 job.sh"));
    runs[0].wait_until_it_says("waiting for host 1, for ");
    runs[1].signal(Signal::INT);
    end(runs, &[130, 130]);
}

#[test]
fn what_ranks_leave_behind_on_another_host_is_ended_and_reported() {
    let hosts = Hosts::new(2);
    hosts.folder.script(
        "job.sh",
        "setsid sh -c 'echo $$ >> pids; trap \"\" TERM; exec sleep 300' > /dev/null 2>&1 &\n\
         while [ $(cat pids 2> /dev/null | wc -l) -lt 2 ]; do sleep 0.02; done; echo done",
    );
    let ended = end(hosts.start_all("--grace 0.5 job.sh"), &[0, 0]);
    let says = "ended processes that ranks 0, 1 had left behind";
    assert!(ended[0].stderr.contains(says), "{ended:?}");
    for pid in hosts.folder.wait_for_lines("pids", 2) {
        assert!(!is_alive(&pid));
    }
}

#[test]
fn output_that_nobody_reads_stops_ranks_and_no_heartbeat() {
    const BLOCKS: usize = 400;
    let hosts = Hosts::new(2);
    hosts.folder.script(
        "flood.sh",
        &format!(
            "[ $RANK = 0 ] && exit 0; block=$(head -c 65535 /dev/zero | tr '\\0' x); i=0\n\
             while [ $i -lt {BLOCKS} ]; do echo \"$block\"; i=$((i + 1)); done; echo done > done"
        ),
    );
    let (reader, writer) = std::io::pipe().unwrap();
    let head = hosts.command(0, "flood.sh");
    let head = Run::start_into(head, Stdio::from(writer));
    let other = hosts.start(1, "flood.sh");
    // The time is three times as long as a host may be silent.
    std::thread::sleep(Duration::from_secs(6));
    assert!(!hosts.folder.path().join("done").exists(), "the rank waits");
    let mut reader = File::from(std::os::fd::OwnedFd::from(reader));
    let count = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut reader, &mut bytes).unwrap();
        bytes.iter().filter(|&&byte| byte == b'x').count()
    });
    end([head, other], &[0, 0]);
    assert_eq!(count.join().unwrap(), BLOCKS * 65535);
}

#[test]
fn a_user_signal_to_any_launcher_is_a_notice_to_the_job() {
    let hosts = Hosts::new(2);
    let trap = "trap 'touch told; sleep 0.1; exit 75' USR1; echo $$ >> pids; ";
    let wait = "while [ ! -e told ]; do sleep 0.02; done; exit 75";
    hosts.folder.script("job.sh", &format!("{trap}{wait}"));
    let runs = hosts.start_all("--max-restarts 3 job.sh");
    hosts.folder.wait_for_lines("pids", 2);
    runs[1].signal(Signal::USR1);
    end(runs, &[75, 75]);
    assert_eq!(hosts.folder.read("pids").lines().count(), 2, "no restart");
}

#[test]
fn a_program_that_is_missing_on_one_host_ends_the_job_on_all() {
    let hosts = Hosts::new(2);
    hosts.folder.script("train.sh", "echo up >> up");
    hosts.folder.script("lost.sh", "exit 0");
    hosts.folder.write("lost.sh", "#!/no/such/interpreter\n");
    for (program, says) in [
        ("none.sh", "the script none.sh cannot be found"),
        (
            "lost.sh",
            "the interpreter /no/such/interpreter, which is not there",
        ),
    ] {
        let runs = ["train.sh", program].into_iter().enumerate();
        let runs = runs.map(|(host, program)| hosts.start(host, program));
        let ended = end(runs, &[2, 2]);
        assert!(ended[0].took < Duration::from_secs(20), "{ended:?}");
        assert!(ended[0].stderr.contains("host 1 ("), "{ended:?}");
        assert!(
            ended.iter().all(|ended| ended.stderr.contains(says)),
            "{ended:?}"
        );
    }
    assert_eq!(hosts.folder.read("up"), "");
}
