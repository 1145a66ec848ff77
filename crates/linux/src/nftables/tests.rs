use std::process::Command;

use rustix::thread::UnshareFlags;

use super::*;
use crate::testing::in_a_child;

fn address(last: u8) -> [u8; 4] {
    [100, 64, 0, last]
}

/// `nft list ruleset`, without the indentation.
fn ruleset() -> Vec<String> {
    let listed = Command::new("nft")
        .args(["list", "ruleset"])
        .output()
        .unwrap();
    assert!(listed.status.success(), "{listed:?}");
    let text = String::from_utf8(listed.stdout).unwrap();
    text.lines().map(|line| line.trim().to_owned()).collect()
}

fn services(transaction: &mut Transaction) {
    transaction.add_table();
    transaction.add_set(&SetSpec {
        name: "services".to_owned(),
        key: vec![SetField::Address, SetField::Protocol, SetField::Port],
        data: Some(MapData::Verdicts),
        flags: SetFlags::default(),
    });
    transaction.add_set(&SetSpec {
        name: "endpoints".to_owned(),
        key: vec![
            SetField::Address,
            SetField::Protocol,
            SetField::Port,
            SetField::Index,
        ],
        data: Some(MapData::Fields(vec![SetField::Address, SetField::Port])),
        flags: SetFlags::default(),
    });
    let [daddr, protocol, port, index] = [0, 1, 2, 3].map(Register::at);
    transaction.add_chain(
        "prerouting",
        Some(ChainHook {
            kind: ChainKind::Nat,
            point: HookPoint::Prerouting,
            priority: -100,
        }),
    );
    transaction.add_chain("random-2", None);
    let key = [
        Expression::destination_address(daddr),
        Expression::transport_protocol(protocol),
        Expression::destination_port(port),
    ];
    let mut dispatch = key.to_vec();
    dispatch.push(Expression::VerdictLookup {
        map: "services".to_owned(),
        key: daddr,
    });
    transaction.add_rule("prerouting", &dispatch);
    let mut choose = key.to_vec();
    choose.extend([
        Expression::Random {
            modulus: 2,
            to: index,
        },
        Expression::MapLookup {
            map: "endpoints".to_owned(),
            key: daddr,
            to: Register::at(4),
        },
        Expression::Nat {
            kind: NatKind::Destination,
            address: Register::at(4),
            port: Some(Register::at(5)),
        },
    ]);
    transaction.add_rule("random-2", &choose);
    let service = [[100, 96, 0, 1], [6, 0, 0, 0], [0, 80, 0, 0]].concat();
    transaction.add_elements(
        "services",
        &[SetElement::with_verdict(
            service.clone(),
            Verdict::Goto("random-2".to_owned()),
        )],
    );
    let endpoints: Vec<_> = (0..2u32)
        .map(|index| {
            let key = [service.clone(), index.to_ne_bytes().to_vec()].concat();
            let value = [address(2 + index as u8), [0x1f, 0x90, 0, 0]].concat();
            SetElement::with_value(key, value)
        })
        .collect();
    transaction.add_elements("endpoints", &endpoints);
}

#[test]
fn nft_lists_the_rules_of_a_transaction() {
    assert!(in_a_child(|| {
        crate::namespace::enter_as_root(UnshareFlags::NEWNET).unwrap();
        let socket = NftablesSocket::open().unwrap();
        let mut transaction = Transaction::new("coracle");
        services(&mut transaction);
        socket.apply(transaction).unwrap();
        let listed = ruleset();
        for expected in [
            "ip daddr . meta l4proto . th dport vmap @services",
            "100.96.0.1 . tcp . 80 : goto random-2",
        ] {
            assert!(
                listed.iter().any(|line| line.contains(expected)),
                "{expected}: {listed:#?}"
            );
        }
        // All or nothing: the chain of the second request does not exist.
        let mut wrong = Transaction::new("coracle");
        wrong.flush_chain("random-2");
        wrong.flush_chain("missing");
        assert_eq!(
            socket.apply(wrong).unwrap_err().kind(),
            std::io::ErrorKind::NotFound
        );
        assert_eq!(ruleset(), listed);
        true
    }));
}

#[test]
fn every_expression_is_accepted_by_the_kernel() {
    assert!(in_a_child(|| {
        crate::namespace::enter_as_root(UnshareFlags::NEWNET).unwrap();
        let socket = NftablesSocket::open().unwrap();
        let mut transaction = Transaction::new("coracle");
        transaction.add_table();
        let base = |kind, point, priority| {
            Some(ChainHook {
                kind,
                point,
                priority,
            })
        };
        transaction.add_chain("raw", base(ChainKind::Filter, HookPoint::Prerouting, -300));
        transaction.add_chain("forward", base(ChainKind::Filter, HookPoint::Forward, 0));
        transaction.add_chain("nat", base(ChainKind::Nat, HookPoint::Prerouting, -100));
        transaction.add_chain("source", base(ChainKind::Nat, HookPoint::Postrouting, 100));
        transaction.add_set(&SetSpec {
            name: "networks".to_owned(),
            key: vec![SetField::Address],
            data: None,
            flags: SetFlags {
                intervals: true,
                dynamic: false,
            },
        });
        transaction.add_elements(
            "networks",
            &[
                SetElement::key([10, 0, 0, 0]),
                SetElement::end([11, 0, 0, 0]),
            ],
        );
        transaction.add_set(&SetSpec {
            name: "affinity".to_owned(),
            key: vec![SetField::Address, SetField::Address],
            data: Some(MapData::Fields(vec![SetField::Address, SetField::Port])),
            flags: SetFlags {
                intervals: false,
                dynamic: true,
            },
        });
        let [first, second, third] = [0, 1, 2].map(Register::at);
        let syn_only = [
            Expression::transport_protocol(first),
            Expression::equals(first, [6]),
            Expression::transport(13, 1, first),
            Expression::Mask {
                from: first,
                to: first,
                mask: vec![0x12],
            },
            Expression::equals(first, [2]),
            Expression::NoTrack,
        ];
        transaction.add_rule("raw", &syn_only);
        let mark = [
            Expression::Meta {
                key: MetaKey::InputInterfaceName,
                to: Register::at(4),
            },
            Expression::Immediate {
                to: first,
                value: 1u32.to_ne_bytes().to_vec(),
            },
            Expression::SetMark { from: first },
        ];
        transaction.add_rule("raw", &mark);
        let mut in_network = vec![Expression::source_address(first)];
        in_network.extend(Expression::in_network(first, [100, 64, 0, 0].into(), 11));
        in_network.extend([
            Expression::Ct {
                key: CtKey::State,
                to: second,
            },
            Expression::destination_address(third),
            Expression::Lookup {
                set: "networks".to_owned(),
                key: third,
                inverted: true,
            },
            Expression::Counter,
            Expression::Reject(RejectKind::PortUnreachable),
        ]);
        transaction.add_rule("forward", &in_network);
        let fib = Expression::Fib {
            result: FibResult::DestinationType,
            to: first,
        };
        let local = [fib, Expression::equals(first, 2u32.to_ne_bytes())];
        transaction.add_rule("raw", &local);
        transaction.add_rule("raw", &[Expression::TransparentSocket { to: first }]);
        let tcp = [
            Expression::transport_protocol(first),
            Expression::equals(first, [6]),
        ];
        let with_tcp = |rest: &[Expression]| [&tcp, rest].concat();
        transaction.add_rule(
            "forward",
            &with_tcp(&[Expression::Reject(RejectKind::TcpReset)]),
        );
        let update = [
            Expression::source_address(first),
            Expression::destination_address(second),
            Expression::Immediate {
                to: Register::at(2),
                value: vec![1, 2, 3, 4],
            },
            Expression::Immediate {
                to: Register::at(3),
                value: vec![0, 80, 0, 0],
            },
            Expression::UpdateMap {
                map: "affinity".to_owned(),
                key: first,
                data: Register::at(2),
                timeout_ms: 10_800_000,
            },
        ];
        transaction.add_rule("nat", &update);
        let port = Expression::Immediate {
            to: first,
            value: vec![0x1b, 0x58],
        };
        transaction.add_rule(
            "nat",
            &with_tcp(&[port, Expression::Redirect { port: first }]),
        );
        transaction.add_rule("source", &[Expression::Masquerade]);
        socket.apply(transaction).unwrap();
        let listed = ruleset();
        for expected in [
            "tcp flags syn / syn,ack notrack",
            "meta mark set 0x00000001",
            "reject",
            "fib daddr type local",
            "redirect to :7000",
            "masquerade",
            "elements = { 10.0.0.0/8 }",
            "update @affinity",
        ] {
            let found = listed.iter().any(|line| line.contains(expected));
            assert!(found, "{expected}: {listed:#?}");
        }
        true
    }));
}

#[test]
fn many_elements_are_split_into_lists() {
    assert!(in_a_child(|| {
        crate::namespace::enter_as_root(UnshareFlags::NEWNET).unwrap();
        let socket = NftablesSocket::open().unwrap();
        socket.enlarge_buffer().unwrap();
        let mut transaction = Transaction::new("coracle");
        transaction.add_table();
        transaction.add_set(&SetSpec {
            name: "pods".to_owned(),
            key: vec![SetField::Address],
            data: None,
            flags: SetFlags::default(),
        });
        let elements: Vec<_> = (0..5000u32)
            .map(|n| SetElement::key(n.to_be_bytes()))
            .collect();
        transaction.add_elements("pods", &elements);
        assert!(transaction.size() < Transaction::MAX_SIZE);
        socket.apply(transaction).unwrap();
        let mut removal = Transaction::new("coracle");
        removal.delete_elements("pods", &elements[1..]);
        socket.apply(removal).unwrap();
        assert!(
            ruleset()
                .iter()
                .any(|line| line == "elements = { 0.0.0.0 }")
        );
        true
    }));
}
