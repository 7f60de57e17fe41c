//! Command lines as people know them from other launchers, and mistakes.

use crate::support::{Ended, Folder};

/// The beginning of a line, and what a dry run shows; after a `!`, what the error says.
const TYPED: &str = "\
--num_processes 2 | processes 2 --num-processes
--num_processes=2 --cpu | ACCEL_DEVICE flex --device
--cpu --device ndarray | ACCEL_DEVICE ndarray --device
--mixed_precision bf16 | ACCEL_PRECISION bf16 --mixed-precision
--mixed_precision=fp16 | ACCEL_PRECISION f16 --mixed-precision
--mixed_precision fp8 | ! expected no, f16 or bf16
--gradient_accumulation_steps 4 | ACCEL_ACCUMULATION_STEPS 4 --gradient-accumulation-steps
--gpu_ids all | GPUs all --gpu-ids
--multi_gpu --num_processes 2 | processes 2 --num-processes
--multi_gpu --gpu_ids 3,4 | processes 2 --nproc-per-node
--num_cpu_threads_per_process 3 | OMP_NUM_THREADS 3 --threads-per-process
--main_process_ip 127.0.0.1 | store host 127.0.0.1 --master-addr
--main_process_port 29511 | store port 29511 --master-port
--num_machines 2 --machine_rank 1 --main_process_ip h --nproc_per_node 3 | host 0 listens at h:29400 --rdzv-endpoint
--num_machines 2 --machine_rank 0 --main_process_ip h --num_processes 4 | ! give --nproc-per-node, the number of ranks
--dynamo_backend no --same_network -n 2 | processes 2 --num-processes
--dynamo_backend=inductor | ! --dynamo_backend inductor is not an option of accel-launch: kernels are compiled
--use_deepspeed | ! --use_deepspeed is not an option of accel-launch: for ZeRO stage 1 write
--zero_stage 3 | ! for ZeRO stage 1 write
--fsdp_activation_checkpointing true | ! ACCEL_UNITS=recompute
--gradient-checkpointing | ! ACCEL_UNITS=recompute
--use_fsdp | ! ACCEL_UNITS=shard
--fsdp_offload_params true | ! ACCEL_UNITS=shard
--use_megatron_lm | ! layers cannot be split across ranks
--tpu | ! write --device cuda, rocm, metal, vulkan, wgpu, flex, cpu or ndarray
-m pkg.train | ! write accel-launch [OPTIONS] python -m MODULE
--module pkg.train | ! write accel-launch [OPTIONS] python -m MODULE
--config_file no.yaml | ! no.yaml cannot be read; `accel-launch config` writes one
--standalone --nproc_per_node=2 | processes 2 --nproc-per-node
--standalone --nnodes=1 --nproc-per-node 2 | processes 2 --nproc-per-node
--nproc 2 | processes 2 --nproc-per-node
--nnodes 2 --node_rank 0 --rdzv_backend c10d --rdzv_id 7 --rdzv_endpoint h:7 | host 0 listens at h:7 --rdzv-endpoint
--rdzv_backend=etcd | ! host 0 serves the rendezvous itself
--tee 3 | ! with --log-dir DIR
--max_restarts=3 --monitor_interval 1 | restarts 3 --max-restarts
--local_addr 10.0.0.1 | ! write --network-interface NAME
-np 2 | processes 2 --num-processes
--np=2 | processes 2 --num-processes
-np 2 -x PATH --bind-to none --allow-run-as-root | processes 2 --num-processes
-x A=1 -np 2 | ! -x A=1 is not an option of accel-launch: ranks inherit the environment
--bind-to core -np 2 | ! write --threads-per-process N
-ppn 2 | processes 2 --nproc-per-node
-N 2 | ! --nnodes for srun and --nproc-per-node for mpirun
-H a:2,b:2 | host 1: b: ssh
-hostfile hosts | host 1: node1: ssh
-np 4 -H a:2,b:2 | ! give the number of ranks per host instead, by --hosts host0:4,host1:4
-mca btl tcp | ! it is for Open MPI, so leave it out
--num_gpus 2 | processes 2 --num-processes
--gpus 2 | ! write --num-processes N, or --nproc-per-node gpu
--include localhost:0,1 | ! write --gpu-ids 0,2
";

fn dry_run(folder: &Folder, line: &str) -> Ended {
    folder.launch(&format!(
        "{line} --dry-run ./train.sh --cpu -np 9 --num_procesess"
    ))
}

#[test]
fn flags_of_other_launchers_work_or_the_error_says_what_to_write() {
    let folder = Folder::new();
    folder.script("train.sh", "true");
    folder.write("hosts", "node0 slots=2\nnode1 slots=2\n");
    for row in TYPED.lines() {
        let (line, expected) = row.split_once(" | ").unwrap();
        let ended = dry_run(&folder, line);
        if let Some(text) = expected.strip_prefix("! ") {
            let ended = ended.expect(2).says(text);
            assert!(ended.stdout.is_empty(), "{line}");
            assert!(!ended.stderr.contains("tip:"), "{line}: {}", ended.stderr);
            continue;
        }
        let ended = ended.expect(0);
        let shown = ended.lines();
        let is_there = shown.iter().any(|row| row.starts_with(expected));
        assert!(is_there, "{line}: {expected:?} is not in {shown:#?}");
        // What stands behind the program is its own.
        let is_over_ssh = line.contains("-H") || line.contains("hostfile");
        let own = "train.sh --cpu -np 9 --num_procesess";
        assert!(is_over_ssh || ended.text().contains(own), "{line}");
    }
}

#[test]
fn a_mistake_is_one_line_and_a_line_of_usage() {
    let folder = Folder::new();
    folder.script("train.sh", "true");
    folder.write("train.py", "");
    for (line, text) in [
        (
            "--num-proceses 2 ./train.sh",
            "unexpected argument '--num-proceses' found; did you mean '--num-processes'?",
        ),
        (
            "--mixed-percision bf16 ./train.sh",
            "did you mean '--mixed-precision'?",
        ),
        (
            "--nproc-per-nod 2 ./train.sh",
            "did you mean '--nproc-per-node'?",
        ),
        (
            "--cpu-only ./train.sh",
            "unexpected argument '--cpu-only' found",
        ),
        ("-n two ./train.sh", "expected a whole number of at least 1"),
        (
            "--mixed-precision half ./train.sh",
            "invalid value 'half' for '--mixed-precision <no|bf16|f16>': expected no, f16 or bf16",
        ),
        (
            "--gradient-accumulation-steps 0 ./train.sh",
            "expected at least 1",
        ),
        (
            "--use_fsdp ./train.sh",
            "--use_fsdp is not an option of accel-launch",
        ),
        ("env --jsn", "did you mean '--json'?"),
        ("runs lst", "did you mean 'list'?"),
    ] {
        let ended = folder.launch(line).expect(2).says(text);
        let lines: Vec<_> = ended.stderr.lines().collect();
        assert_eq!(lines.len(), 2, "{line}: {lines:#?}");
        assert!(
            lines[0].starts_with("error: ") && lines[1].starts_with("usage: accel-launch"),
            "{lines:#?}"
        );
        assert!(!ended.stderr.contains("as a value"), "{lines:#?}");
    }
    for (line, text) in [
        ("no-such", "the script no-such cannot be found"),
        ("train.py", "write `accel-launch [OPTIONS] python train.py`"),
        ("no-such.rs", "the source file no-such.rs cannot be found"),
        ("-n 2", "nothing to start"),
    ] {
        folder.refuses(line, text);
    }
    for (name, meant) in [
        ("ACCEL_MIXED_PRECISION", "ACCEL_PRECISION"),
        ("ACCEL_TRASNPORT", "ACCEL_TRANSPORT"),
    ] {
        let ended = folder
            .launch_with("-n 2 ./train.sh", [(name, "1")])
            .expect(2);
        ended.says(&format!("{name} is not known; did you mean {meant}?"));
    }
}

#[test]
fn options_set_the_variables_that_programs_read() {
    let folder = Folder::new();
    folder.script(
        "show.sh",
        "echo $ACCEL_PRECISION $ACCEL_ACCUMULATION_STEPS $ACCEL_DEVICE",
    );
    let line =
        "--mixed_precision fp16 --gradient_accumulation_steps 4 --cpu --no-prefix -q ./show.sh";
    let set = [("ACCEL_PRECISION", "bf16")];
    assert_eq!(
        folder.launch_with(line, set).expect(0).text(),
        "f16 4 flex\n"
    );
    assert_eq!(
        folder
            .launch_with("-n 1 -q ./show.sh", set)
            .expect(0)
            .text(),
        "bf16\n"
    );
    assert_eq!(folder.ok("-n 1 -q ./show.sh"), "\n");
}
