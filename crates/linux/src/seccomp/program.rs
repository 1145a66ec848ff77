//! Compiles rules about system calls to a BPF program, which the kernel runs at each call.

use super::calls::SystemCall;

/// The action of the filter for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilterAction {
    /// Returns this errno without running the call. Zero is success.
    Error(i32),
}

/// The condition of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// For all arguments.
    Always,
    /// The argument at this index, masked, is not zero.
    AnyBit(u8, u32),
    /// The argument at this index, masked, equals the value.
    Equals(u8, u32, u32),
    /// The argument at this index is none of these.
    NotIn(u8, &'static [u32]),
}

/// A call, a condition and the action. All other calls are allowed.
#[derive(Clone, Copy, Debug)]
pub struct FilterRule(pub SystemCall, pub Condition, pub FilterAction);

// Offsets into struct seccomp_data.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;
/// From linux/audit.h.
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
const AUDIT_ARCH_I386: u32 = 0x4000_0003;
/// Calls of the x32 ABI have the architecture x86_64 and this bit in the number.
const X32: u32 = 0x4000_0000;

const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
const AND: u32 = libc::BPF_ALU | libc::BPF_AND | libc::BPF_K;

/// Compiles the rules.
pub fn program(rules: &[FilterRule]) -> Vec<libc::sock_filter> {
    let native = compile_section(rules, |call| {
        call.x86_64.iter().map(|number| *number as u32).collect()
    });
    let other = compile_section(rules, |call| call.i386.to_vec());
    let mut code = vec![
        statement(LOAD, ARCHITECTURE),
        jump(libc::BPF_JEQ, AUDIT_ARCH_X86_64, 3, 0),
        jump(libc::BPF_JEQ, AUDIT_ARCH_I386, 1, 0),
        // x86_64 processors run no other architecture.
        return_action(FilterAction::Error(libc::ENOSYS)),
        // Only unconditional jumps have an offset that is large enough.
        statement(libc::BPF_JMP | libc::BPF_JA, native.len() as u32),
    ];
    code.extend(native);
    code.extend(other);
    code
}

/// The rules for one architecture. Every path ends with a return.
fn compile_section(
    rules: &[FilterRule],
    numbers: impl Fn(&SystemCall) -> Vec<u32>,
) -> Vec<libc::sock_filter> {
    let mut code = load_number().to_vec();
    for FilterRule(call, condition, action) in rules {
        for number in numbers(call) {
            let check = compile_condition(*condition, *action);
            // Conditional jumps have 8-bit relative offsets, which suffices for every condition.
            code.push(jump(libc::BPF_JEQ, number, 0, check.len() as u8));
            code.extend(check);
        }
    }
    code.push(statement(RETURN, libc::SECCOMP_RET_ALLOW));
    code
}

/// Loads the number of the call. Calls that x32 shares with x86_64 have the same number and the same rules.
fn load_number() -> [libc::sock_filter; 2] {
    [statement(LOAD, NUMBER), statement(AND, !X32)]
}

/// Returns the action if `condition` holds; otherwise loads the number of the call again and falls through.
fn compile_condition(condition: Condition, action: FilterAction) -> Vec<libc::sock_filter> {
    let argument = |index: u8| statement(LOAD, ARGUMENTS + 8 * u32::from(index));
    let mut code = match condition {
        Condition::Always => return vec![return_action(action)],
        Condition::AnyBit(index, bits) => vec![
            argument(index),
            jump(libc::BPF_JSET, bits, 0, 1),
            return_action(action),
        ],
        Condition::Equals(index, bits, value) => vec![
            argument(index),
            statement(AND, bits),
            jump(libc::BPF_JEQ, value, 0, 1),
            return_action(action),
        ],
        Condition::NotIn(index, values) => {
            let mut code = vec![argument(index)];
            for (at, value) in values.iter().enumerate() {
                code.push(jump(libc::BPF_JEQ, *value, (values.len() - at) as u8, 0));
            }
            code.push(return_action(action));
            code
        }
    };
    code.extend(load_number());
    code
}

fn statement(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    }
}

fn jump(code: u32, k: u32, yes: u8, no: u8) -> libc::sock_filter {
    libc::sock_filter {
        code: (libc::BPF_JMP | code | libc::BPF_K) as u16,
        jt: yes,
        jf: no,
        k,
    }
}

fn return_action(action: FilterAction) -> libc::sock_filter {
    let FilterAction::Error(number) = action;
    statement(RETURN, libc::SECCOMP_RET_ERRNO | number as u32)
}
