{{/* The release's name, with `outbox` in it. A CronJob's may have 52 characters, of which a consumer's has 22 at most. */}}
{{- define "outbox.fullname" -}}
{{- ternary .Release.Name (printf "%s-outbox" .Release.Name) (contains "outbox" .Release.Name) | trunc 29 | trimSuffix "-" -}}
{{- end }}

{{/* What selects the pods of a part. Takes root and component; of the whole release without component. */}}
{{- define "outbox.selector" -}}
app.kubernetes.io/name: outbox
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- define "outbox.labels" -}}
{{ include "outbox.selector" . }}
app.kubernetes.io/version: {{ .root.Values.image.tag | default .root.Chart.AppVersion | trunc 63 | quote }}
{{- end }}

{{- define "outbox.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "outbox.fullname" .) }}
{{- end }}

{{- define "outbox.podMetadata" -}}
labels: {{- include "outbox.labels" . | nindent 2 }}
{{- with .root.Values.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* A pod's spec but for its containers. Takes root, secret and sinkSecret: the Secrets to mount. */}}
{{- define "outbox.pod" -}}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.podSpec }}
{{ toYaml . }}
{{- end }}
volumes:
{{- with .secret }}
  - name: secrets
    secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with .sinkSecret }}
  - name: sink-secrets
    secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
  - {name: tmp, emptyDir: {}}
{{- end }}

{{/*
A container. Takes root, name, args and resources; besides
  settings   which win over those of all pods
  image      instead of the relay's
  kafka      whether it talks to Kafka, and needs its secrets
  fields     more variables, as Kubernetes has them
  volume     the one with its Secret
*/}}
{{- define "outbox.container" -}}
{{- $image := .image | default .root.Values.image }}
{{- $settings := dict "OUTBOX_NAME" (.root.Values.name | default .root.Release.Name) }}
{{- with .root.Values.archiveDays }}{{ $_ := set $settings "OUTBOX_RELAY__ARCHIVE_DAYS" . }}{{ end }}
{{- $settings = mergeOverwrite $settings (deepCopy .root.Values.settings) (deepCopy (.settings | default dict)) }}
{{- $_ := set $settings "OUTBOX_DATABASE_URL_FILE" "/run/secrets/outbox/database-url" }}
{{- if .kafka }}
{{- range $setting, $key := .root.Values.kafkaSecrets }}
{{- $_ := set $settings (printf "%s_FILE" $setting) (printf "/run/secrets/outbox/%s" $key) }}
{{- end }}
{{- end -}}
- name: {{ .name }}
  {{- if $image.digest }}
  image: {{ $image.repository }}@{{ $image.digest }}
  {{- else }}
  image: {{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}
  {{- end }}
  imagePullPolicy: {{ $image.pullPolicy }}
  args: {{ toJson .args }}
  env:
    {{- range $name, $value := $settings }}
    - {name: {{ $name }}, value: {{ $value | toString | quote }}}
    {{- end }}
    {{- with .fields }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL]}
  resources: {{- toYaml .resources | nindent 4 }}
  volumeMounts:
    - {name: {{ .volume | default "secrets" }}, mountPath: /run/secrets/outbox, readOnly: true}
    - {name: tmp, mountPath: /tmp}
{{- end }}

{{/* The port of the metrics, and the probes, of a relay or a consumer. Takes how many seconds a start may take. */}}
{{- define "outbox.probes" -}}
ports:
  - {name: metrics, containerPort: 9100}
startupProbe:
  httpGet: {path: /livez, port: metrics}
  periodSeconds: 2
  failureThreshold: {{ div . 2 }}
livenessProbe:
  httpGet: {path: /livez, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}

{{/* The migration's pod: all steps but the last are init containers, which run in order. */}}
{{- define "outbox.migrate" -}}
restartPolicy: Never
serviceAccountName: {{ .root.Values.migrate.serviceAccount }}
{{ include "outbox.pod" . }}
{{- $last := sub (len .steps) 1 | int }}
{{- with slice .steps 0 $last }}
initContainers:
{{- range . }}
  {{- include "outbox.container" (merge . $.container) | nindent 2 }}
{{- end }}
{{- end }}
containers:
  {{- include "outbox.container" (merge (index .steps $last) .container) | nindent 2 }}
{{- end }}

{{/* A CronJob. Takes root, name, secret and args. */}}
{{- define "outbox.prune" }}
{{- $part := dict "root" .root "component" "prune" }}
---
apiVersion: batch/v1
kind: CronJob
metadata:
  name: {{ include "outbox.fullname" .root }}-{{ .name }}
  labels: {{- include "outbox.labels" $part | nindent 4 }}
spec:
  schedule: {{ .root.Values.prune.schedule | quote }}
  concurrencyPolicy: Forbid
  jobTemplate:
    spec:
      backoffLimit: 3
      template:
        metadata: {{- include "outbox.podMetadata" $part | nindent 10 }}
        spec:
          restartPolicy: Never
          serviceAccountName: {{ include "outbox.serviceAccount" .root }}
          {{- include "outbox.pod" . | nindent 10 }}
          containers:
            {{- include "outbox.container" (merge (dict "resources" .root.Values.prune.resources) .) | nindent 12 }}
{{- end }}

{{/* A consumer's pod; takes what its container takes. */}}
{{- define "outbox.consumer" -}}
serviceAccountName: {{ include "outbox.serviceAccount" .root }}
terminationGracePeriodSeconds: 120
{{ include "outbox.pod" . }}
containers:
  {{- include "outbox.container" . | nindent 2 }}
{{- end }}

{{/* What every pod may reach: names, and Postgres. */}}
{{- define "outbox.database" -}}
- ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
- ports: [{port: {{ .port }}}]
  {{- with .to }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
