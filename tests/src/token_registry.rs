//! A registry with token authentication: Debian's `docker-registry`, behind a small proxy that issues tokens and can stall in the
//! middle of a layer.

use crate::{Lab, Registry, Running, wait_until};

/// The address of the proxy, as in image references.
pub const TOKENS: &str = "login:5002";

/// Makes the key that signs tokens, and the certificate by which the registry verifies them.
const KEY: &str = "cd ~/tokens && openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=tokens -keyout key.pem -out cert.pem";
/// The status of a request without credentials.
const UNAUTHENTICATED_REQUEST: &str =
    "curl --silent --output /dev/null --write-out '%{http_code}' http://login:5002/v2/";
/// Prints a line for each request: method, path, range, status. While a file `stall` exists, it sends only the first half of a
/// layer.
const SERVER: &str = r#"
import base64, http.client, http.server, json, os, socket, subprocess, time, urllib.parse

CREDENTIALS = "Basic " + base64.b64encode(b"user:right").decode()
REQUEST_HEADERS = ["Authorization", "Accept", "Range"]
RESPONSE_HEADERS = ["Content-Type", "Content-Length", "Content-Range", "Docker-Content-Digest", "WWW-Authenticate"]

def encoded(data):
    return base64.urlsafe_b64encode(data).rstrip(b"=")

def signed(claims):
    certificate = "".join(open("cert.pem").read().split("-----")[2].split())
    header = {"typ": "JWT", "alg": "RS256", "x5c": [certificate]}
    text = b".".join(encoded(json.dumps(part).encode()) for part in (header, claims))
    sign = ["openssl", "dgst", "-sha256", "-sign", "key.pem"]
    signature = subprocess.run(sign, input=text, stdout=subprocess.PIPE, check=True).stdout
    return (text + b"." + encoded(signature)).decode()

class Server(http.server.BaseHTTPRequestHandler):
    def handle(self):
        # Close connections that begin with a TLS handshake: those clients retry without TLS.
        if self.connection.recv(1, socket.MSG_PEEK) != b"\x16":
            super().handle()

    def log_request(self, code="-", size="-"):
        print(self.command, self.path, self.headers.get("Range", "-"), int(code), flush=True)

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        if url.path == "/token":
            self.issue_token(urllib.parse.parse_qs(url.query))
        else:
            self.proxy()

    do_HEAD = do_GET

    def issue_token(self, query):
        credentials = self.headers.get("Authorization")
        if credentials not in (None, CREDENTIALS):
            return self.respond(401, {"details": "incorrect username or password"})
        # Without credentials, the token grants nothing.
        scopes = [scope.split(":") for scope in query.get("scope", []) if credentials]
        access = [{"type": kind, "name": name, "actions": actions.split(",")} for kind, name, actions in scopes]
        now = int(time.time())
        claims = {"iss": "lab", "sub": "user", "aud": query["service"][0], "iat": now, "nbf": now, "exp": now + 300,
                  "jti": str(time.time_ns()), "access": access}
        self.respond(200, {"token": signed(claims)})

    def respond(self, code, document):
        body = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def proxy(self):
        upstream = http.client.HTTPConnection("login", 5003)
        headers = {name: ", ".join(self.headers.get_all(name)) for name in REQUEST_HEADERS if name in self.headers}
        upstream.request(self.command, self.path, headers=headers)
        response = upstream.getresponse()
        self.send_response(response.status)
        for name in RESPONSE_HEADERS:
            if response.getheader(name):
                self.send_header(name, response.getheader(name))
        self.end_headers()
        left = response.length or 0
        stalls = left > 4 << 20 and os.path.exists("stall")
        if stalls:
            left //= 2
        while left > 0 and (piece := response.read(min(left, 1 << 16))):
            self.wfile.write(piece)
            left -= len(piece)
        self.wfile.flush()
        while stalls and os.path.exists("stall"):
            time.sleep(0.05)

http.server.ThreadingHTTPServer(("", 5002), Server).serve_forever()
"#;

/// A registry with token authentication, stopped on drop.
#[derive(Debug)]
pub struct TokenRegistry<'a> {
    lab: &'a Lab,
    proxy: Option<Running>,
    registry: Option<Running>,
}

impl Lab {
    /// Starts the registry, with the images that were pushed to another one.
    #[track_caller]
    pub fn start_token_registry(&self, images: &Registry<'_>) -> TokenRegistry<'_> {
        self.write("tokens/server.py", SERVER);
        self.sh(KEY).run().succeeded();
        let auth = format!(
            "{{realm: 'http://{TOKENS}/token', service: lab, issuer: lab, rootcertbundle: /home/user1/tokens/cert.pem}}"
        );
        let config = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\n\
             auth: {{token: {auth}}}\nhttp: {{addr: ':5003'}}\n",
            images.data()
        );
        let file = self.write("tokens/config.yml", &config);
        let registry = self.command(&["docker-registry", "serve", &file]).start();
        let proxy = self.sh("cd ~/tokens && exec /usr/bin/python3 server.py");
        let running = TokenRegistry {
            lab: self,
            proxy: Some(proxy.start()),
            registry: Some(registry),
        };
        wait_until(20, "the registry demands a token", || {
            self.sh(UNAUTHENTICATED_REQUEST).run().stdout.trim() == "401"
        });
        running
    }
}

impl TokenRegistry<'_> {
    /// The requests so far, one per line: method, path, range or `-`, status.
    pub fn requests(&self) -> String {
        let printed = self.proxy.as_ref().map(Running::stdout);
        printed.unwrap_or_default()
    }

    /// From now on, sends only half of a layer, and keeps the connection open.
    #[track_caller]
    pub fn stall(&self) {
        self.lab.write("tokens/stall", "");
    }

    /// Sends whole layers again.
    pub fn resume(&self) {
        self.lab.remove("tokens/stall");
    }
}

impl Drop for TokenRegistry<'_> {
    fn drop(&mut self) {
        drop(self.proxy.take());
        drop(self.registry.take());
        self.lab.remove("tokens");
    }
}
