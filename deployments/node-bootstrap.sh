#!/bin/bash
# A rented machine runs this script first, as root (EC2's user-data). tasks/providers/ec2/userdata.py fills in the values.
# Schedule the shutdown first, so that the machine ends even without the controller. EC2 terminates it after the shutdown.
shutdown -h +@minutes@ "srift: the deadline of lease "@lease@ || { (sleep @seconds@; shutdown -h now) & }
# A reboot loses the timer and the work, so cloud-init shuts the machine down at every later boot.
boots=${SRIFT_BASE:-/var/lib}/cloud/scripts/per-boot
[ ! -d "$boots" ] || { printf '#!/bin/sh\nshutdown -h now\n' >"$boots/srift" && chmod 755 "$boots/srift"; }
umask 022
export PYTHONDONTWRITEBYTECODE=1
python=@python@
user=${SRIFT_USER:-srift} # SRIFT_USER, SRIFT_BASE and AWS_EC2_METADATA_SERVICE_ENDPOINT: only an emulated host sets these
work=$(mktemp -d "${SRIFT_BASE:-/var/lib}/srift-XXXXXX") && mkdir "$work"/{boot,code,mailbox} && chmod 755 "$work" ||
  { shutdown -h now; exit 1; }

cat >"$work/boot/metadata.py" <<'SRIFT_END_OF_FILE'
@metadata@
SRIFT_END_OF_FILE
cat >"$work/boot/fetch.py" <<'SRIFT_END_OF_FILE'
import hashlib, json, sys, time
import boto3
from botocore.exceptions import BotoCoreError, ClientError
from metadata import Metadata

verb, bucket, region, endpoint, prefix, lease, role_id, value = sys.argv[1:9]
for left in reversed(range(8)):
    try:
        s3 = boto3.client("s3", region_name=region, endpoint_url=endpoint or None)
        if verb == "failed":
            machine = f"{role_id}:{Metadata().get('instance-id')}"
            body = json.dumps({"reason": value, "failed_unix": time.time()})
            s3.put_object(Bucket=bucket, Key=f"{prefix}/leases/{lease}/{machine}/out/failed.json", Body=body)
        else:
            s3.download_file(bucket, f"{prefix}/code/{value}.tar.gz", sys.argv[9])
        break
    except (BotoCoreError, ClientError):  # a new machine's role gets its rights after some seconds
        if not left:
            raise
        time.sleep(4)
if verb == "fetch" and hashlib.sha256(open(sys.argv[9], "rb").read()).hexdigest() != value:
    sys.exit("the code archive has a wrong SHA-256 digest")
SRIFT_END_OF_FILE

boot() { # VERB VALUE [FILE]
  timeout 300 "$python" "$work/boot/fetch.py" "$1" @bucket@ @region@ @endpoint@ @prefix@ @lease@ @role_id@ "${@:2}"
}
failed() {
  echo "srift: $1"
  boot failed "$1"
  until shutdown -h now; do sleep 5; done
  exit 1
}

export AWS_METADATA_SERVICE_NUM_ATTEMPTS=5 AWS_METADATA_SERVICE_TIMEOUT=2
unset AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AWS_PROFILE # use only the role's credentials
[ -x "$python" ] || { missing=$python; python=python3; failed "the image has no $missing: see [ec2] python"; }
# AWS's Deep Learning AMIs have boto3 in their Python.
"$python" -c "import boto3" || "$python" -m pip install --quiet boto3 || echo "srift: $python has no boto3"
id -u "$user" >/dev/null 2>&1 || useradd --system --no-create-home --shell /usr/sbin/nologin "$user" ||
  failed "user $user could not be created"
said=$(boot fetch @code_sha256@ "$work/code.tar.gz" 2>&1) ||
  failed "the code could not be fetched: $(tail -n 1 <<<"$said")"
tar -xzf "$work/code.tar.gz" -C "$work/code" --no-same-owner --no-same-permissions && cd "$work/code" ||
  failed "the code archive could not be unpacked"

# The courier exchanges files with S3 as root. It blocks access of $user to the metadata service, then runs the agent as $user.
"$python" -m node.on_ec2.courier --bucket @bucket@ --prefix @prefix@ --region @region@ @endpoint_option@ \
  --lease @lease@ --role-id @role_id@ --user "$user" --python "$python" \
  --deadline-s $((@seconds@ - SECONDS)) --directory "$work/mailbox"
# The courier powers the machine off. The next line does so if the courier did not start.
until shutdown -h now; do sleep 5; done
